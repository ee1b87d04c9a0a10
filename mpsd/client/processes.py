"""Programs and functions that run in processes of their own, each under a lease.

A lease that is over before its program, or a program that is over before its lease, is what nobody wants: the lease of
`spawn` is held by the program itself, and that of `Pool` and `process` by this process, with which the workers end.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, NoReturn, TypeAlias

from mpsd.client import become
from mpsd.client.client import Client
from mpsd.client.pool import Pool, process
from mpsd.client.starter import start
from mpsd.core.errors import MpsdError

__all__ = ["Pool", "Process", "process", "spawn"]
