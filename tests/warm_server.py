"""``python warm_server.py LISTENER``: the server of warm.py. LISTENER is the file descriptor of a listening socket.

For each request it forks a process, which becomes the program of the request: it takes over the arguments, the
folder, the environment and the standard files, runs ``-c CODE``, ``-m MODULE`` or a script as ``__main__``, and ends
as any interpreter does.
"""

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
import types
from typing import NamedTuple


class Request(NamedTuple):
    """A program to run."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    file_size_limit: int  # in bytes
    files: list[int]  # the descriptors of standard input, output and error


def main():
    """Serves until standard input ends. In a forked process it runs a program, and returns when that is done."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    while has_request(listener):
        connection, _ = listener.accept()
        request = receive_request(connection)
        import_torch_and_fairseq()
        if os.fork() == 0:
            # this process only waits for the program, while the server goes on
            program = os.fork()
            if program == 0:
                listener.close()
                connection.close()
                become(request)
                return
            close_files(request)
            report_end(program, connection)
        close_files(request)
        connection.close()
    wait_for_children(block=True)


def has_request(listener):
    """Waits; returns true for a request, and false once standard input has ended: then no request will come."""
    readable, _, _ = select.select([listener, sys.stdin], [], [])
    wait_for_children(block=False)
    return sys.stdin not in readable


def wait_for_children(block):
    """Waits for the processes that have ended, or (`block`) for all, so that their CPU time counts as this one's."""
    try:
        while os.waitpid(-1, 0 if block else os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass  # there are none


def receive_request(connection):
    """Returns the request that warm.ask_server sends: a byte with the files, then a line of JSON."""
    connection.setblocking(True)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile() as lines:
        return Request(**json.loads(lines.readline()), files=files)


def close_files(request):
    for file in request.files:
        os.close(file)


def report_end(program, connection):
    """Waits for the program, sends its exit status as subprocess would say it, and ends this process."""
    try:
        _, status = os.waitpid(program, 0)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    finally:
        os._exit(0)


def import_torch_and_fairseq():
    """Imports both at the first request, without fairseq's advice to install optional packages."""
    if "fairseq" not in sys.modules:
        logging.disable(logging.INFO)
        import fairseq.models.transformer  # noqa: F401

        logging.disable(logging.NOTSET)
        gc.freeze()  # no forked process needs to look through these objects


def become(request):
    """Runs the program of the request in this process, from the state in which a fresh interpreter would begin it."""
    take_over_process_state(request)
    how, *rest = request.arguments
    if how == "-c":
        code, *arguments = rest
        set_arguments(import_folder="", argv=["-c", *arguments], environment=request.environment)
        forget_logging_of_imports(code)
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(code, "<string>", "exec"), module.__dict__)
    elif how == "-m":
        name, *arguments = rest
        set_arguments(import_folder=request.folder, argv=["-m", *arguments], environment=request.environment)
        forget_logging_of_imports(name)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        script_folder = os.path.dirname(os.path.realpath(how))
        set_arguments(import_folder=script_folder, argv=request.arguments, environment=request.environment)
        runpy.run_path(how, run_name="__main__")


def take_over_process_state(request):
    """Sets the standard files, folder, environment, limits, threads and random numbers of this process."""
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    limit = request.file_size_limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if "OMP_NUM_THREADS" in request.environment:  # which torch has read when it was imported
        sys.modules["torch"].set_num_threads(int(request.environment["OMP_NUM_THREADS"]))
    # every fresh process has other random numbers, until it sets a seed
    random.seed()
    sys.modules["numpy"].random.seed()


def set_arguments(import_folder, argv, environment):
    """Sets sys.argv, and sys.path with the folder that an interpreter puts first and those of PYTHONPATH."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [import_folder, *filter(None, folders), *sys.path[1:]]
    sys.argv[:] = argv


def forget_logging_of_imports(program):
    """Removes the logging that fairseq sets up when it is imported, if the program is one of fairseq's commands.

    Those set logging up themselves before they import fairseq.
    """
    if "fairseq_cli" in program:
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
