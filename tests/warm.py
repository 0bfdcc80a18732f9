"""Runs Python programs for the tests in "warm" processes, which have imported torch and fairseq already.

A fresh interpreter needs about six seconds of CPU time to import torch and fairseq, and the tests start some sixty
programs. The function `run` therefore asks a server (warm_server.py) for a process. The server has imported torch and
fairseq, but nothing of this project. It forks itself for each request.

A warm process differs from a fresh one: the imports have already happened, and it does not free its memory at its end.
A test has to pass ``fresh=True`` if it is about one of the following:

- the locale
- environment variables that Python, torch or fairseq read when they start
- the order of imports, or what a program does *not* import
- kernels in Triton's interpreter, because the server has imported Triton without its interpreter
- a result that depends on the order of a set, because all warm processes share one seed for the hashes of strings
"""

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SOCKET_VARIABLE = "FAIRSEQ_SYNTH_WARM_SOCKET"  # the environment variable that tells all workers where the server is
SERVER_PROGRAM = Path(__file__).parent / "warm_server.py"


def run(arguments, cwd=None, env=None, input="", file_size_limit=None, fresh=False):
    """Runs ``python ARGUMENTS...`` in a warm process and returns a subprocess.CompletedProcess.

    Its attributes `stdout` and `stderr` are strings, and `returncode` is the exit status.

    Args:
        arguments: ``-c CODE``, ``-m MODULE`` or the path of a script, then the program's own arguments.
        cwd: the program's working folder; by default the working folder of this process.
        env: all environment variables of the program; by default those of this process.
        input: what the program reads from standard input.
        file_size_limit: the most bytes that the program can write to one file, as if the disk were full; None: any
            number. It has no effect together with ``fresh``.
        fresh: whether to start an ordinary interpreter instead of a warm process.
    """
    arguments = [str(argument) for argument in arguments]
    if env is None:
        env = os.environ
    environment = {name: str(value) for name, value in env.items()}
    if fresh:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=cwd, env=environment, input=input, capture_output=True, text=True)
    if cwd is None:
        cwd = os.getcwd()
    if file_size_limit is None:
        file_size_limit = resource.RLIM_INFINITY
    request = {
        "arguments": arguments,
        "folder": str(Path(cwd).absolute()),
        "environment": environment,
        "file_size_limit": file_size_limit,
    }
    # The standard files of the program are temporary files. They are read after its end.
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        stdin.write(input)
        stdin.seek(0)
        exit_status = ask_server(request, files=[stdin, stdout, stderr])
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, exit_status, stdout.read(), stderr.read())


def ask_server(request, files):
    """Lets the server run a program, waits for its end, and returns its exit status.

    Args:
        request: the program as a dictionary, whose keys are the fields of `warm_server.Request` except for `files`.
        files: the open files that become the program's standard input, output and error.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET_VARIABLE])
        a_byte = b"\n"  # files cannot be sent without at least one byte
        socket.send_fds(connection, [a_byte], [file.fileno() for file in files])
        line = json.dumps(request) + "\n"
        connection.sendall(line.encode())
        answer = connection.makefile().readline()  # the exit status, or "" if the server has closed the connection
    if not answer:
        raise RuntimeError("the server of warm processes has ended; its error is above")
    return int(answer)


class Server:
    """Starts and stops the server of warm processes, which also ends if this process is killed."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.process = None

    def start(self):
        """Starts the server. Requests can be sent at once, and torch is imported only at the first request."""
        address = os.path.join(self.folder.name, "socket")
        # Each request has its own environment variables, but two variables take effect before a request arrives. They
        # are removed, so that the server does not take them over from this process:
        # - Python reads PYTHONPATH when it starts. The server adds the folders of each request to sys.path instead.
        # - Triton reads TRITON_INTERPRET when it is imported. It would choose the interpreter then, but the programs
        #   compile kernels.
        removed_names = ("PYTHONPATH", "TRITON_INTERPRET")
        environment = {name: value for name, value in os.environ.items() if name not in removed_names}
        # The end of the with statement closes the socket in this process only. The server has a copy of it (pass_fds).
        # The system keeps requests in the queue of the socket (listen) until the server has started and accepts them.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, SERVER_PROGRAM, str(listener.fileno())],
                env=environment,
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,  # this pipe is closed when this process ends or is killed, which ends the server
            )
        os.environ[SOCKET_VARIABLE] = address

    def stop(self):
        """Ends the server as soon as all programs that it has started have ended."""
        self.process.stdin.close()
        self.process.wait()
        del os.environ[SOCKET_VARIABLE]
        self.folder.cleanup()
