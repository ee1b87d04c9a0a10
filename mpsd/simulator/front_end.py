"""The simulator's front-end: one connection, commands from stdin until its end, answers on stdout.

Its protocol with `control_daemon` is the simulator's own and not NVIDIA's. On a unix stream socket,

- the daemon greets with one byte: SERVED, or how to exit when it is serving another front-end;
- the front-end sends a command and a newline, and the daemon the answer and END: no lines, one, or many;
- the front-end sends END when it has no more commands, and the daemon closes the connection;
- instead of an answer the daemon sends LAST_WORDS and its exit status, one byte, when it quits.

The behaviour of NVIDIA's front-end in each case was measured on 470.256.02, 535.261.03, 550.163.01 and 555.58.02.
"""

import _socket  # not socket: its imports take longer than a conversation does
import os
import select
import sys

SERVED = b"+"
TURNED_AWAY = (b"!", b"-", b"0")
"""Three ways in which NVIDIA's front-end fails while another is served, at random: a message and status 1, no output
and status 1, no output and status 0. Here the daemon chooses, and cycles through them."""

END = b"\0"
LAST_WORDS = b"\4"

_LONGEST_LINE = 4095
_NO_DAEMON = "Cannot find MPS control daemon process\n"
_CANNOT_SEND = "Cannot send command to MPS control daemon process\n"


class _QuitError(Exception):
    """The daemon quit, with this status."""


def main() -> int:
    """Hold one conversation with the control daemon on CUDA_MPS_PIPE_DIRECTORY; return the exit status."""
    path = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps") + "/control"  # noqa: S108 - NVIDIA's own default
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        sys.stderr.write(_NO_DAEMON)
        return 1
    answers: list[bytes] = []
    try:
        status = _converse(connection, answers)
    except _QuitError as quitting:
        # NVIDIA's front-end usually loses its unprinted output when the daemon quits (two times in three).
        return int(quitting.args[0])
    except ConnectionError as error:
        status = 1
        if isinstance(error, BrokenPipeError):
            sys.stderr.write(_CANNOT_SEND)
    _print(answers)
    return status


def _print(answers: list[bytes]) -> None:
    sys.stdout.buffer.write(b"".join(answers))
    sys.stdout.buffer.flush()
    answers.clear()


def _converse(connection: _socket.socket, answers: list[bytes]) -> int:
    """Forward stdin, collect the answers, and return the exit status.

    Answers are printed at the end, or line by line on a terminal. Raises ConnectionError when the daemon dies.
    """
    greeting = connection.recv(1)
    if greeting == TURNED_AWAY[0]:
        raise BrokenPipeError
    if greeting != SERVED:
        return 0 if greeting == TURNED_AWAY[2] else 1
    at_once = os.isatty(1)
    ready = select.poll()
    ready.register(0, select.POLLIN)
    ready.register(connection, select.POLLIN)
    text = b""
    while True:
        if connection.fileno() in dict(ready.poll()) and _receive(connection) is None:
            return 1  # nothing was sent, so this is the daemon's end
        more = os.read(0, _LONGEST_LINE)
        *lines, text = (text + more).split(b"\n")
        if not more and text:
            lines, text = [text], b""
        for line in lines:
            # As in C, a NUL ends the line.
            connection.sendall(line.partition(END)[0] + b"\n")
            answer = _receive(connection)
            if answer is None:
                return 1
            answers.append(answer)
            if at_once:
                _print(answers)
        if not more:
            connection.sendall(END)
            _receive(connection)
            return 0


def _receive(connection: _socket.socket) -> bytes | None:
    """Return the next answer, or None when the daemon closed the connection. Raises `_QuitError` when it quit."""
    answer = b""
    while not answer.endswith(END):
        more = connection.recv(65536)
        if not more:
            return None
        answer += more
        if answer[:1] == LAST_WORDS and len(answer) > 1:
            raise _QuitError(answer[1])
    return answer[: -len(END)]
