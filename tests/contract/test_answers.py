"""A control daemon's answer to each command: silences, oddities, and reasons that only its log has."""

from typing import Final

from mpsd.core.mps.commands import TABLE, echo_of
from mpsd.core.mps.limits import LIMITS
from tests.contract.differences import answered, known
from tests.contract.subjects import Bench, Exchange

SET_PERCENTAGE: Final = "set_default_active_thread_percentage"
GET_PERCENTAGE: Final = "get_default_active_thread_percentage"
SET_LIMIT: Final = "set_default_device_pinned_mem_limit"
GET_LIMIT: Final = "get_default_device_pinned_mem_limit"

INVALID_PERCENTAGE: Final = "Invalid percentage, expected between (0.0, 100.0]"
NO_LIMIT: Final = "No default pinned memory limit set for the device!"
INVALID_ORDINAL: Final = "Invalid device ordinal!"
GPU: Final = "GPU-11111111-2222-3333-4444-555555555555"

REFUSED_PERCENTAGES: Final = ("0", "-5", "abc", "150", "101", "100.01", "100.0001", "", "nan", "inf", "-0", "%50")

TAKEN_PERCENTAGES: Final = {
    "25": "25.0",
    "100": "100.0",
    "33.3": "33.3",
    "33.333": "33.3",
    "12.25": "12.2",
    "12.35": "12.3",
    "12.54": "12.5",
    "12.55": "12.6",
    "99.99": "100.0",
    "0.1": "0.1",
    "0.05": "0.1",
    "0.04": "0.0",
    "0.001": "0.0",
    "1e1": "10.0",
    "0x10": "16.0",
    "+7": "7.0",
    "50abc": "50.0",
    "51%": "51.0",
    "20 30": "20.0",
}

MEM_LIMITS: Final = {
    # Valid values are stored, and read back as whole G, rounded down, from 1 GiB on.
    "1M": "1M",
    "512M": "512M",
    "512m": "512M",
    "1023M": "1023M",
    "1024M": "1G",
    "1044M": "1G",
    "1536M": "1G",
    "2047M": "1G",
    "2048M": "2G",
    "8191M": "7G",
    "8G": "8G",
    "8g": "8G",
    "1024G": "1024G",
    # Values that look wrong are not refused: the digits count, and every unit but G is M.
    "100": "100M",
    "3X": "3M",
    "10T": "10M",
    "1K": "1M",
    "1.5G": "1M",
    "2GiB": "2G",
    "1GB": "1G",
    "+5M": "5M",
    "-1G": "17179869183G",
    "-1": "17179869183G",
    "99999999999M": "97656249G",
    "18446744073709551616M": "17179869183G",
    # A value that equals zero removes the limit.
    "0": None,
    "0M": None,
    "0.5G": None,
    "0x10M": None,
    "abc": None,
    "G": None,
    "": None,
    "17179869184G": None,
    "17592186044416M": None,
}

DEVICES: Final[dict[str, tuple[list[str | None], list[str]]]] = {
    # Arguments for a limit of 2G: the resulting limits of devices 0 (3G), 1 (4G) and 2 (5G), and the log.
    "0": (["2G", "4G", "5G"], []),
    "1": (["3G", "2G", "5G"], []),
    "01": (["3G", "2G", "5G"], []),
    "+1": (["3G", "2G", "5G"], []),
    "31": (["3G", "4G", "5G"], []),
    "4294967297": (["3G", "2G", "5G"], []),
    "32": (["3G", "4G", "5G"], [INVALID_ORDINAL]),
    "-1": (["3G", "4G", "5G"], [INVALID_ORDINAL]),
    "99999999999999999999": (["3G", "4G", "5G"], [INVALID_ORDINAL]),
    # A name that is no ordinal removes the limit of a device: that of its leading digits, or of device 0 without any.
    "abc": ([None, "4G", "5G"], []),
    GPU: ([None, "4G", "5G"], []),
    "MIG-2": ([None, "4G", "5G"], []),
    "0x1": ([None, "4G", "5G"], []),
    "1abc": (["3G", None, "5G"], []),
    "1,2": (["3G", None, "5G"], []),
    "2=2G": (["3G", "4G", None], []),
}

UNKNOWN_SERVER: Final = {
    # The printed answer, which is also logged, except for an empty line.
    "get_client_list 999": ["Server 999 not found"],
    "get_client_list": ["Server 0 not found"],
    "get_client_list abc": ["Server 0 not found"],
    "get_client_list -1": ["Server -1 not found"],
    "get_server_status 999": ["Server 999 not found"],
    "get_server_status": ["A server PID is required"],
    "get_server_status abc": ["A server PID is required"],
    "get_device_client_list 999": ["Server 999 not found"],
    "get_device_client_list": [],
    "get_device_client_list abc": [],
    "get_server_list": [],
    "get_server_list 999": [],
    "ps": ["Server not found"],
    "ps 999": ["Server not found"],
    "ps -p 999": ["Server 999 not found", "Server 999 not found", ""],
    "ps -p": ["Server 0 not found", "Server 0 not found", ""],
    "terminate_client 999 1000": ["Server 999 not found", "Server 999 not found!", "1"],
    "terminate_client": ["Server 0 not found", "Server 0 not found!", "1"],
    "get_active_thread_percentage 999": ["Server 999 not found"],
    "set_active_thread_percentage 999 10": ["Server 999 not found"],
    "set_active_thread_percentage 999 150": ["Server 999 not found"],
    "get_device_pinned_mem_limit 999 0": ["Server 999 not found"],
    "set_device_pinned_mem_limit 999 0 1G": ["Server 999 not found"],
    "shutdown_server 999": ["Server 999 not found"],
    "shutdown_server 999 -f": ["Server 999 not found"],
    "shutdown_server -f 999": ["Server 0 not found"],
    "start_server": ["A user id (UID) is required to start a new server"],
    "start_server 0": ["A user id (UID) is required to start a new server"],
    "start_server -uid": ["A user id (UID) is required to start a new server"],
    "start_server -uid abc": ["A user id (UID) is required to start a new server"],
}

PRIORITIES: Final = {
    # The answer, and the value in force afterwards if it was 0 before.
    "0": ([], "0"),
    "1": ([], "1"),
    "1x": ([], "1"),
    "abc": ([], "0"),
    "": ([], "0"),
    "7": (["Invalid priority value - must be 0 or 1!"], "0"),
    "-1": (["Invalid priority value - must be 0 or 1!"], "0"),
}

NOT_COMMANDS: Final = {
    "bogus": "bogus",
    "bogus a b c": "bogus",
    "  bogus": "bogus",
    'bo"gus': 'bo"gus',
    "%s%d": "%s%d",
    "bogus;get_server_list": "bogus;get_server_list",
    "": "",
    "   ": "",
    "help": "help",
    "get_server_lis": "get_server_lis",
    GET_PERCENTAGE.upper(): GET_PERCENTAGE.upper(),
}


def test_percentages_refused(bench: Bench) -> None:
    """A percentage outside (0, 100] changes nothing and is answered with the old one; the reason is in the log."""
    commands = [f"{SET_PERCENTAGE} 42", *(f"{SET_PERCENTAGE} {text}".strip() for text in REFUSED_PERCENTAGES)]
    expected = [Exchange(command, ["42.0"], [INVALID_PERCENTAGE, "42.0"]) for command in commands[1:]]
    assert bench.exchange(commands)[1:] == expected


def test_percentages_taken(bench: Bench) -> None:
    """A percentage is kept to one decimal, so that a small one reads back as zero; text after the digits is ignored."""
    commands = [line for text in TAKEN_PERCENTAGES for line in (f"{SET_PERCENTAGE} {text}", GET_PERCENTAGE)]
    expected = [
        Exchange(command, [value], [value])
        for text, value in TAKEN_PERCENTAGES.items()
        for command in (f"{SET_PERCENTAGE} {text}", GET_PERCENTAGE)
    ]
    assert bench.exchange(commands) == expected


def test_memory_limits(bench: Bench) -> None:
    """Every memory limit is accepted silently, and reads back as a lower limit, or none."""
    lines = {text: [f"{SET_LIMIT} 0 7M", f"{SET_LIMIT} 0 {text}".strip(), f"{GET_LIMIT} 0"] for text in MEM_LIMITS}
    found = bench.exchange([line for script in lines.values() for line in script])
    branch = bench.subject.branch
    expected: list[Exchange] = []
    for text, value in MEM_LIMITS.items():
        for command in lines[text][:2]:
            silence = answered(command, [], branch)
            expected.append(Exchange(command, silence, silence))
        read_back = answered(GET_LIMIT, [] if value is None else [value], branch)
        expected.append(Exchange(f"{GET_LIMIT} 0", read_back, read_back or [NO_LIMIT]))
    assert found == expected


def test_devices(bench: Bench) -> None:
    """An ordinal below 32 is accepted, with or without a GPU.

    A name that is no ordinal removes another device's limit.
    """
    branch = bench.subject.branch
    before = [f"{SET_LIMIT} 0 3G", f"{SET_LIMIT} 1 4G", f"{SET_LIMIT} 2 5G"]
    after = [f"{GET_LIMIT} {device}" for device in range(3)]
    scripts = [[*before, f"{SET_LIMIT} {device} 2G", *after] for device in DEVICES]
    found = bench.exchange([line for script in scripts for line in script])
    expected: list[Exchange] = []
    for script, (limits, log) in zip(scripts, DEVICES.values(), strict=True):
        for command in script[:3]:
            silence = answered(command, [], branch)
            expected.append(Exchange(command, silence, silence))
        silence = answered(SET_LIMIT, [], branch)
        expected.append(Exchange(script[3], silence, silence or log))
        for command, limit in zip(after, limits, strict=True):
            read_back = answered(command, [] if limit is None else [limit], branch)
            expected.append(Exchange(command, read_back, read_back or [NO_LIMIT]))
    assert found == expected


def test_limits_of_devices_that_are_not_there(bench: Bench) -> None:
    """A device without a limit is answered with silence, and every name that is no ordinal is read as the ordinal 0."""
    branch = bench.subject.branch
    rows = {
        GET_LIMIT: (["6G"], ["6G"]),
        f"{GET_LIMIT} 0": (["6G"], ["6G"]),
        f"{GET_LIMIT} abc": (["6G"], ["6G"]),
        f"{GET_LIMIT} {GPU}": (["6G"], ["6G"]),
        f"{GET_LIMIT} 1": ([], [NO_LIMIT]),
        f"{GET_LIMIT} 31": ([], [NO_LIMIT]),
        f"{GET_LIMIT} 32": ([], [INVALID_ORDINAL]),
        f"{GET_LIMIT} -1": ([], [INVALID_ORDINAL]),
    }
    found = bench.exchange([f"{SET_LIMIT} 0 6G", *rows])[1:]
    assert found == [
        Exchange(command, answered(command, printed, branch), answered(command, logged, branch))
        for command, (printed, logged) in rows.items()
    ]


def test_unknown_servers(bench: Bench) -> None:
    """Every command that names a missing server says so, in one, two or three lines."""
    found = bench.exchange(list(UNKNOWN_SERVER))
    expected = []
    for command, lines in UNKNOWN_SERVER.items():
        printed = answered(command, lines, bench.subject.branch)
        expected.append(Exchange(command, printed, [line for line in printed if line]))
    assert found == expected


def test_client_priorities(bench: Bench) -> None:
    """A client priority is 0 or 1, and text is read as 0; here a refusal is printed."""
    setter, getter = "set_default_client_priority", "get_default_client_priority"
    branch = bench.subject.branch
    found = bench.exchange(
        [line for text in PRIORITIES for line in (f"{setter} 0", f"{setter} {text}".strip(), getter)]
    )
    expected = []
    for text, (lines, value) in PRIORITIES.items():
        for command, answer in ((f"{setter} 0", []), (f"{setter} {text}".strip(), lines), (getter, [value])):
            printed = answered(command, answer, branch)
            expected.append(Exchange(command, printed, printed))
    assert found == expected


def test_what_is_no_command(bench: Bench) -> None:
    """An unknown command is echoed up to the first space, and the conversation continues: mpsd's marks rely on that."""
    found = bench.exchange(list(NOT_COMMANDS))
    assert found == [Exchange(line, [echo_of(name)], [echo_of(name)]) for line, name in NOT_COMMANDS.items()]


def test_which_commands_a_driver_knows(bench: Bench) -> None:
    """A driver branch knows exactly the commands whose row in core/mps/commands names it or an older branch."""
    harmless = [row.name for row in TABLE.values() if row.name != "quit"]
    found = bench.exchange(harmless)
    knows = {exchange.command: exchange.printed != [echo_of(exchange.command)] for exchange in found}
    assert knows == {name: known(name, bench.subject.branch) for name in harmless}


def test_which_limits_a_driver_has(bench: Bench) -> None:
    """A driver branch knows all four commands of a limit from the branch on that the table of limits names."""
    names = {
        limit: (limit.default_setter, limit.default_getter, limit.server_setter, limit.server_getter)
        for limit in LIMITS
    }
    found = bench.exchange([name for each in names.values() for name in each])
    known_here = {each.command for each in found if each.printed != [echo_of(each.command)]}
    has = [limit for limit in LIMITS if limit.since <= bench.subject.branch]
    assert known_here == {name for limit in has for name in names[limit]}


def test_how_much_a_command_answers(bench: Bench) -> None:
    """A command with a one-line answer in the table always answers one line: mpsd's framing relies on that."""
    rows = [row for row in TABLE.values() if row.one_line and row.since <= bench.subject.branch]
    commands = [f"{row.name}{arguments}" for row in rows for arguments in ("", " 1", " 999 1 2", " abc", " 0 7G")]
    assert [each.command for each in bench.exchange(commands) if len(each.printed) != 1] == []


def test_reading_changes_nothing(bench: Bench) -> None:
    """No command that the table marks as reading changes a default, whatever its arguments."""
    getters = [GET_PERCENTAGE, f"{GET_LIMIT} 0", "get_default_client_priority", "get_server_list"]
    settings = [f"{SET_PERCENTAGE} 42", f"{SET_LIMIT} 0 3G", "set_default_client_priority 1"]
    readers = [f"{row.name} 0 1G" for row in TABLE.values() if not row.changes]
    before = bench.exchange([*settings, *getters])[len(settings) :]
    assert bench.exchange([*readers, *getters])[len(readers) :] == before


ENVIRONMENTS: Final = {
    # A variable at the start, the resulting percentage, and the lines of the log.
    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50"): ("50.0", []),
    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "33.33x"): ("33.3", []),
    **{
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", text): (
            "100.0",
            ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE should be between (0.0, 100.0]"],
        )
        for text in ("0", "101", "abc", "-1", "")
    },
    ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=2T"): ("100.0", []),
    ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=2G"): ("100.0", []),
}


def test_environment_at_the_start(idle: Bench) -> None:
    """The daemon takes a percentage from its environment and starts with any value, but takes no memory limit.

    A memory limit of the environment is passed to the servers, and no command of the front-end reads it back.
    """
    for (name, value), (percentage, complaints) in ENVIRONMENTS.items():
        idle.start(**{name: value})
        getters = idle.exchange([GET_PERCENTAGE, f"{GET_LIMIT} 0"])
        assert [each.printed for each in getters] == [[percentage], answered(GET_LIMIT, [], idle.subject.branch)], value
        assert [line for line in idle.log() if name in line] == complaints, value
        idle.kill()
        idle.log_file.unlink()


def test_priority_from_the_environment(idle: Bench) -> None:
    """The daemon takes a client priority from its environment if it knows client priorities."""
    idle.start(CUDA_MPS_CLIENT_PRIORITY="1")
    getter = "get_default_client_priority"
    assert idle.exchange([getter])[0].printed == answered(getter, ["1"], idle.subject.branch)
