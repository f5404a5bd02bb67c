"""Stands for Python where a launcher insists on starting it: tests/startup/forked.py makes a fork in its place.

``python -I -S client.py ADDRESS script *arguments`` sends what it was started with, open files too, to the server at
ADDRESS, passes signals on, and ends as the fork does.
"""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in listed if number != server.fileno() and os.path.exists(f"/proc/self/fd/{number}")]
    request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    socket.send_fds(server, [json.dumps(request).encode() + b"\n"], files)
    answers = server.makefile()
    process = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(process, number))
    code = int(answers.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
