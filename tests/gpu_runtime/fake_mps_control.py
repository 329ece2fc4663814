"""Stands in for nvidia-cuda-mps-control: `-d` starts a daemon, without it commands from stdin are passed to the daemon.

FAKE_MPS says what goes wrong: refuses, vanishes, mute, stubborn. A daemon ends by itself after LIFETIME_S.
"""

import os
import signal
import socket
import sys
import time

LIFETIME_S = 40.0

mode = os.environ.get("FAKE_MPS", "")
pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
pid_file = os.path.join(pipes, "nvidia-cuda-mps-control.pid")


def background(body, *arguments):
    """Run `body(*arguments)` in a new process and return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            body(*arguments)
        finally:
            os._exit(0)
    return pid


def serve(*inherited):
    for opened in inherited:
        opened.close()
    time.sleep(LIFETIME_S)


def daemon():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else signal.SIG_DFL)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(pipes, "control"))
    listener.listen()
    listener.settimeout(LIFETIME_S)
    with open(pid_file, "w") as file:
        file.write(f"{os.getpid()}\n")
    servers = []
    while True:
        connection, _ = listener.accept()
        command = connection.recv(1000).decode().strip()
        if mode == "mute":
            time.sleep(LIFETIME_S)
        if command.startswith("start_server"):
            servers.append(background(serve, listener, connection))
        elif command == "get_server_list":
            connection.sendall("".join(f"{server}\n" for server in servers).encode())
        elif command == "quit" and mode != "stubborn":
            for server in servers:
                os.kill(server, signal.SIGKILL)
            os.unlink(pid_file)
            return
        connection.close()


if "-d" in sys.argv:
    if mode == "refuses":
        sys.exit("Failed to initialize: no device\nmore of it")
    if mode != "vanishes":
        background(background, daemon)
else:
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.path.join(pipes, "control"))
            client.sendall(sys.stdin.read().encode())
            while answer := client.recv(1000):
                sys.stdout.write(answer.decode())
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
