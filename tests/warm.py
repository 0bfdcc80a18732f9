"""Processes that begin with torch and fairseq imported, which takes six seconds of a fresh one, and nothing else.

``python warm.py SOCKET`` is a server. It imports torch and fairseq, as any program here does first and without this
project, at its first request, and forks itself for each: the child is given a command line, an environment, a folder
and the three standard files, runs ``-c CODE``, ``-m MODULE`` or a script as ``__main__`` at the interpreter's top
level, and ends as any interpreter does. What counts before the imports, such as a locale, needs a fresh process.

`run` is ``subprocess.run`` of this interpreter with such a process, or with a fresh one where there is no server.
"""

import os
import socket
import subprocess
import sys
import time

ADDRESS = "FAIRSEQ_SYNTH_WARM"  # the environment variable with the path of the socket


def run(argv, cwd=None, env=None, input=None, limit=None, fresh=False, text=True):
    """A CompletedProcess of ``python ARGV...``. limit: of a file's size in bytes, for RLIMIT_FSIZE."""
    argv, env = list(map(str, argv)), dict(os.environ if env is None else map(lambda pair: map(str, pair), env.items()))
    address = os.environ.get(ADDRESS)
    if fresh or not address or not hasattr(socket, "send_fds"):
        before = (lambda: limit_files(limit)) if limit else None
        return subprocess.run(
            [sys.executable, *argv], cwd=cwd, env=env, input=input, capture_output=True, text=text, preexec_fn=before
        )
    # the client of the server is a small process of its own, which has subprocess.run's pipes
    client = [sys.executable, "-S", "-E", __file__, address, str(limit or 0), *argv]
    return subprocess.run(client, cwd=cwd, env=env, input=input, capture_output=True, text=text)


def limit_files(size):
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def ask(address, limit, argv):
    """The client: hands its command line, folder, environment and files over, and ends as the child does."""
    import json
    import signal

    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        message = json.dumps([argv, os.getcwd(), dict(os.environ), limit]).encode()
        socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(message)
        status = int(server.makefile().readline() or 1)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def serve(address):
    """Forks for each request; comes back in the children alone, each with its request."""
    import json

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        server.settimeout(10)
        parent = os.getppid()
        while True:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                if os.getppid() != parent:  # whoever started it is gone
                    os._exit(0)
                continue
            connection.setblocking(True)
            while True:  # what earlier ones have used is counted as this process'
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        break
                except ChildProcessError:
                    break
            size, files, _, _ = socket.recv_fds(connection, 8, 3)
            if not files:  # the end
                while True:
                    try:
                        os.wait()
                    except ChildProcessError:
                        os._exit(0)
            request = json.loads(connection.makefile("rb").read(int.from_bytes(size, "big")))
            import_all()
            if os.fork():
                for file in files:
                    os.close(file)
                connection.close()
                continue
            child = os.fork()
            if child:  # which waits for it
                for file in files:
                    os.close(file)
                try:
                    connection.sendall(b"%d\n" % os.waitpid(child, 0)[1])
                finally:
                    os._exit(0)
            connection.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return request


def import_all():
    if "fairseq" not in sys.modules:
        import logging

        logging.disable(logging.INFO)  # what fairseq says on optional packages
        import fairseq.models.transformer  # noqa: F401

        logging.disable(logging.NOTSET)


def without_handlers():
    """fairseq's commands configure logging before they import fairseq, which does so for all other programs."""
    import logging

    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


def become(argv, folder, environment, limit):
    """Runs a command line as a fresh interpreter would."""
    import gc
    import runpy
    import types

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if limit:
        limit_files(limit)
    where, rest = {"-c": ("", argv[2:]), "-m": (folder, argv[2:])}.get(
        argv[0], (os.path.dirname(os.path.realpath(argv[0])), argv[1:])
    )
    sys.path[:] = [where, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    sys.argv[:] = [argv[0], *rest]
    if "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if "fairseq_cli" in " ".join(argv[:2]):
        without_handlers()
    gc.freeze()
    if argv[0] == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        return lambda: exec(compile(argv[1], "<string>", "exec"), main.__dict__)
    if argv[0] == "-m":
        return lambda: runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(argv[0], run_name="__main__")


def start(folder):
    """A server, its socket in a folder. It imports nothing until it is asked for something."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    address = os.path.join(folder, "warm")
    server = subprocess.Popen([sys.executable, __file__, address], env=environment, cwd=folder)
    while not os.path.exists(address) and server.poll() is None:
        time.sleep(0.01)
    os.environ[ADDRESS] = address
    return server


def end(server):
    """The server ends when all its children have."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ.pop(ADDRESS))
        connection.sendall(b"\0" * 8)
    server.wait()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        ask(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    become(*serve(sys.argv[1]))()
