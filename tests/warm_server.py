"""Runs the server of warm.py: ``python warm_server.py LISTENER``.

LISTENER is the file descriptor of a listening socket, which the server inherits from the process that starts it.

For each request, the server forks a process. This process takes over the arguments, the working folder, the
environment variables and the standard files of the request. Then it runs ``-c CODE``, ``-m MODULE`` or a script as
``__main__``. It ends as any interpreter does, but without freeing its memory: this would take a second, in which it
would copy the memory that it shares with the server.
"""

import atexit
import gc
import json
import logging
import os
import random
import resource
import runpy
import select
import socket
import sys
import threading
import types
from typing import NamedTuple


class Request(NamedTuple):
    """A program to run, as `warm.run` describes it."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    file_size_limit: int  # in bytes, or resource.RLIM_INFINITY
    files: list[int]  # the descriptors of standard input, output and error


def main():
    """Serves requests until standard input ends.

    There are three kinds of processes. The server forks a waiting process for each request, and goes on with the next
    request. The waiting process forks the program, waits for its end and reports its exit status.
    """
    listener_descriptor = int(sys.argv[1])
    listener = socket.socket(fileno=listener_descriptor)
    while wait_for_request(listener):
        connection, _ = listener.accept()
        request = receive_request(connection)
        import_torch_and_fairseq()
        is_waiting_process = os.fork() == 0  # fork returns 0 in the new process
        if is_waiting_process:
            start_program_and_exit(request, listener, connection)  # ends the waiting process, so it does not return
        else:
            # The server does not need the files and the connection any more: the waiting process and the program have
            # copies of their own.
            close_files(request)
            connection.close()
    wait_for_all_children()


def start_program_and_exit(request, listener, connection):
    """Forks the program of a request, waits for its end and reports it. Only the waiting process calls this function.

    The function does not return: both processes, the waiting one and the program, end in it.

    Args:
        request: the request.
        listener: the socket at which the server waits for requests. The waiting process has a copy of it.
        connection: the socket to the process that has sent the request.
    """
    program_pid = os.fork()
    is_program = program_pid == 0  # fork returns 0 in the new process
    if is_program:
        listener.close()
        connection.close()
        run_program_and_exit(request)
    else:
        close_files(request)
        report_end_and_exit(program_pid, connection)


def wait_for_request(listener):
    """Waits for the next request and returns True, or returns False if standard input has ended."""
    readable, _, _ = select.select([listener, sys.stdin], [], [])
    wait_for_ended_children()
    return sys.stdin not in readable


def wait_for_ended_children():
    """Removes the children of this process that have ended, so that they do not stay in the system as zombies.

    Their CPU time then counts as time of this process.
    """
    any_child = -1
    try:
        while True:
            pid, _status = os.waitpid(any_child, os.WNOHANG)  # WNOHANG: returns 0 instead of waiting
            if pid == 0:
                return  # the other children are still running
    except ChildProcessError:
        return  # there are no children


def wait_for_all_children():
    """Waits until all children of this process have ended."""
    any_child = -1
    no_options = 0
    try:
        while True:
            os.waitpid(any_child, no_options)
    except ChildProcessError:
        return  # there are no children any more


def receive_request(connection):
    """Returns the request that `warm.ask_server` sends: a byte together with three files, then a line of JSON."""
    connection.setblocking(True)
    _byte, files, _flags, _address = socket.recv_fds(connection, bufsize=1, maxfds=3)
    with connection.makefile() as lines:
        fields = json.loads(lines.readline())
    return Request(**fields, files=files)


def close_files(request):
    """Closes the standard files of a program in a process that does not use them."""
    for file in request.files:
        os.close(file)


def report_end_and_exit(program_pid, connection):
    """Waits for the end of the program, sends its exit status, and ends this process.

    The exit status is negative if a signal has ended the program, as in the module subprocess.

    Args:
        program_pid: the process number of the program.
        connection: the socket to the process that has sent the request.
    """
    no_options = 0
    try:
        _pid, wait_status = os.waitpid(program_pid, no_options)
        exit_status = os.waitstatus_to_exitcode(wait_status)
        connection.sendall(f"{exit_status}\n".encode())
    finally:
        os._exit(0)


def import_torch_and_fairseq():
    """Imports torch and fairseq if this is the first request, without fairseq's messages about optional packages.

    The module torch._dynamo is imported, too. Each training imports it when it makes an optimizer, which takes three
    seconds. It also imports Triton, without its interpreter; see `warm.Server.start`.
    """
    if "fairseq" not in sys.modules:
        logging.disable(logging.INFO)
        import fairseq.models.transformer  # noqa: F401
        import torch._dynamo  # noqa: F401

        logging.disable(logging.NOTSET)
        gc.freeze()  # the garbage collector of a forked process then ignores these objects, which saves time


def run_program_and_exit(request):
    """Runs the program of the request, and ends this process with the exit status of the program.

    Like an interpreter, this function shows an error by sys.excepthook, waits for other threads, and calls the
    functions that are registered with atexit.
    """
    try:
        run_program(request)
        exit_status = 0
    except SystemExit as exit:
        exit_status = find_exit_status(exit.code)
    except Exception:
        sys.excepthook(*sys.exc_info())
        exit_status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)


def find_exit_status(code):
    """Returns the exit status for the argument of sys.exit.

    A text is an error message: it is printed, and the exit status is 1. None is the status 0.
    """
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def run_program(request):
    """Runs the program of the request in this process, as a fresh interpreter would."""
    take_over_process_state(request)
    first_argument, *other_arguments = request.arguments
    if first_argument == "-c":
        code, *arguments = other_arguments
        set_arguments(import_folder="", argv=["-c", *arguments], environment=request.environment)
        forget_logging_of_imports(code)
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(code, "<string>", "exec"), module.__dict__)
    elif first_argument == "-m":
        name, *arguments = other_arguments
        set_arguments(import_folder=request.folder, argv=["-m", *arguments], environment=request.environment)
        forget_logging_of_imports(name)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        script = first_argument
        script_folder = os.path.dirname(os.path.realpath(script))
        set_arguments(import_folder=script_folder, argv=request.arguments, environment=request.environment)
        runpy.run_path(script, run_name="__main__")


def take_over_process_state(request):
    """Sets the standard files, folder, environment, file size limit and threads of this process as the request says."""
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    limit = request.file_size_limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    # torch has read this variable when it was imported, before it had the value of the request.
    if "OMP_NUM_THREADS" in request.environment:
        sys.modules["torch"].set_num_threads(int(request.environment["OMP_NUM_THREADS"]))
    # In a fresh interpreter, random numbers differ from process to process until the program sets a seed.
    random.seed()
    sys.modules["numpy"].random.seed()


def set_arguments(import_folder, argv, environment):
    """Sets sys.argv and sys.path as a fresh interpreter would.

    Args:
        import_folder: the first folder of sys.path, which depends on how the program is started.
        argv: the new sys.argv.
        environment: the variables of the program. PYTHONPATH has further folders of sys.path.
    """
    python_path = environment.get("PYTHONPATH", "").split(os.pathsep)
    folders = [folder for folder in python_path if folder != ""]
    _folder_of_server, *other_folders = sys.path
    sys.path[:] = [import_folder, *folders, *other_folders]
    sys.argv[:] = argv


def forget_logging_of_imports(program):
    """Removes the logging that fairseq set up when it was imported, if the program is one of fairseq's commands.

    In a fresh interpreter, such a command sets up the logging itself before it imports fairseq.

    Args:
        program: the code of the program or the name of its module.
    """
    if "fairseq_cli" in program:
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
