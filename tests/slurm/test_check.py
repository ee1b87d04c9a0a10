"""The checks of Slurm's configuration, and the lines that need no check."""

from dataclasses import replace
from typing import Final

import pytest

from mpsd.core.slurm import configuration, lines
from mpsd.core.slurm.check import Seen, Verdict, findings
from mpsd.core.slurm.configuration import Configuration
from mpsd.core.slurm.lines import Device

GIB: Final = 2**30

HOOKS: Final = "/etc/mpsd/slurm"

SLURM: Final = f"""\
GresTypes=gpu,mps,gpumem   # with memory
PrologFlags=Alloc,Contain
Prolog={HOOKS}/prolog
Epilog={HOOKS}/epilog
TaskProlog={HOOKS}/task-prolog
HealthCheckProgram={HOOKS}/health
ProctrackType=proctrack/cgroup
JobSubmitPlugins=lua
NodeName=n1 CPUs=8 \\
    Gres=gpu:2,mps:200,gpumem:160G
PartitionName=main Nodes=ALL
"""

GRES: Final = """\
Name=gpu File=/dev/nvidia[0-1]
Name=mps Count=100 File=/dev/nvidia0 Flags=all_sharing
Name=mps Count=100 File=/dev/nvidia1 Flags=all_sharing
Name=gpumem Count=160G Flags=CountOnly
"""

CGROUP: Final = "ConstrainDevices=yes\n"


def seen(slurm: str = SLURM, gres: str = GRES, cgroup: str = CGROUP) -> Seen:
    found = configuration.parse(slurm, gres, cgroup)
    gpus = frozenset({0, 1})
    return Seen(configuration=found, version="22.05.8", grace=15, wait=15, node="n1", gpus=gpus)


def words(found: Seen) -> str:
    return "\n".join(f"{each.verdict}: {each.because}" for each in findings(found))


def test_a_right_configuration_has_no_findings() -> None:
    assert not findings(seen())


def changed(old: str, new: str) -> Seen:
    texts = [each.replace(old, new) for each in (SLURM, GRES, CGROUP)]
    assert texts != [SLURM, GRES, CGROUP]
    return seen(*texts)


@pytest.mark.parametrize(
    ("old", "new", "verdict", "said"),
    [
        ("GresTypes=gpu,mps,", "GresTypes=gpu,mps,shard,", "fail", "both mps and shard"),
        ("GresTypes=gpu,mps,gpumem", "GresTypes=gpu", "fail", "neither mps nor shard"),
        ("Name=mps", "Name=other", "fail", "gres.conf has no line for mps"),
        ("mps:200,", "", "fail", "no node of slurm.conf has mps"),
        (" Flags=all_sharing", "", "warn", "one_sharing"),
        ("File=/dev/nvidia[0-1]", "File=/dev/nvidia[0-2]", "fail", "gres.conf names /dev/nvidia2, which is no GPU"),
        ("Name=gpu File=/dev/nvidia[0-1]", "AutoDetect=nvml", "warn", "names no device files"),
        ("Alloc,Contain", "Alloc", "fail", "PrologFlags has no Contain"),
        ("Alloc,Contain", "Contain,NoHold", "warn", "NoHold"),
        (f"Prolog={HOOKS}/prolog\n", "", "fail", "slurm.conf has no Prolog"),
        (f"Epilog={HOOKS}/epilog", "Epilog=/etc/other", "fail", "/etc/other does not call mpsd's epilog"),
        (f"HealthCheckProgram={HOOKS}/health", "", "warn", "HealthCheckProgram"),
        ("proctrack/cgroup", "proctrack/linuxproc", "warn", "ProctrackType"),
        ("ConstrainDevices=yes", "", "warn", "ConstrainDevices is not set"),
        ("File=/dev/nvidia[0-1]", "File=/dev/nvidia[0-1],/dev/nvidiactl", "fail", "gres.conf names /dev/nvidiactl"),
        ("ProctrackType", "KillWait=5\nProctrackType", "warn", "KillWait=5 is shorter than the 15 s"),
        ("ProctrackType", "PrologEpilogTimeout=20\nProctrackType", "fail", "PrologEpilogTimeout=20 can end"),
        ("JobSubmitPlugins=lua\n", "", "fail", "JobSubmitPlugins has no lua: users can forge"),
    ],
)
def test_each_fault_is_found(old: str, new: str, verdict: str, said: str) -> None:
    (*found,) = [each for each in findings(changed(old, new)) if said in each.because]
    assert len(found) == 1, words(changed(old, new))
    assert found[0].verdict == verdict
    assert found[0].remedy


def test_what_the_scripts_say_counts() -> None:
    """A script of the site's own may call ours; one that starts a control daemon is told of."""
    site = changed(f"Prolog={HOOKS}/prolog", "Prolog=/etc/slurm/prolog.sh")
    assert "does not call mpsd's prolog" in words(site)
    calls = f"#!/bin/sh\nexec {HOOKS}/prolog\n"
    assert not findings(replace(site, scripts={"/etc/slurm/prolog.sh": calls}))
    starts = f"{calls}nvidia-cuda-mps-control -d\n"
    assert "starts or stops a control daemon of its own" in words(
        replace(site, scripts={"/etc/slurm/prolog.sh": starts})
    )


def test_allowed_devices() -> None:
    site = seen(cgroup=f"{CGROUP}AllowedDevicesFile=/etc/slurm/allowed\n")
    assert "no /dev/nvidiactl" in words(replace(site, scripts={"/etc/slurm/allowed": "/dev/null\n"}))
    assert not findings(replace(site, scripts={"/etc/slurm/allowed": "/dev/null\n/dev/nvidia*\n"}))


def test_what_stands_outside_of_the_files() -> None:
    assert "job_submit.lua does not call mpsd.lua" in words(replace(seen(), is_scripted=False))
    assert "memory cannot be asked for" in words(replace(seen(), comment=False))
    assert "has not seen Slurm 27.11.1" in words(replace(seen(), version="27.11.1"))
    assert "version of Slurm is not known" in words(replace(seen(), version=""))
    alone = replace(seen(), one_user=True)
    assert "one user at a time" in words(alone)
    fitting = configuration.parse(SLURM.replace("Nodes=ALL", "Nodes=ALL ExclusiveUser=YES"), GRES, CGROUP)
    assert not findings(replace(alone, configuration=fitting))


def test_the_lines_of_install_need_no_check() -> None:
    """What install shows for a node has no findings, and keeps what the site had."""
    devices = [Device(f"/dev/nvidia{number}", 79 * GIB) for number in (0, 2)]
    present = configuration.parse("GresTypes=gpu,craynetwork\nJobSubmitPlugins=throttle\nPrologFlags=X11\n")
    for kind in ("mps", "shard"):
        slurm = [*lines.of_slurm("n1", devices, kind, HOOKS, present)]
        node = slurm[-1].partition("NodeName=n1 ... ")[2]
        assert node == f"Gres=gpu:2,{kind}:{2 * lines.PER_GPU[kind]},gpumem:{158 * 1024}M"
        text = "\n".join([*slurm, f"NodeName=n1 {node}", "PartitionName=main Nodes=ALL"])
        found = configuration.parse(text, "\n".join(lines.of_gres("n1", devices, kind)), CGROUP)
        assert found.words("GresTypes") == ["gpu", kind, "gpumem", "craynetwork"]
        assert found.words("JobSubmitPlugins") == ["throttle", "lua"]
        assert found.words("PrologFlags") == ["contain", "x11"]
        gpus = frozenset({0, 2})
        assert not findings(Seen(configuration=found, version="26.05.5", grace=15, wait=15, node="n1", gpus=gpus))


def test_reading() -> None:
    found = configuration.parse('A=1\na=2 B="x y" # C=3\nNodeName=n[1-2] Gres=gpu:tesla:2(S:0),mps:no_consume:100\n')
    assert (found.value("a"), found.value("b"), found.value("c")) == ("2", "x y", "")
    assert configuration.resources(found.nodes[0]["gres"]) == {"gpu": 2, "mps": 100}
    assert configuration.files("/dev/nvidia[0-2,05]") == [f"/dev/nvidia{each}" for each in ("0", "1", "2", "05")]
    assert configuration.included("Include  /etc/slurm/more.conf") == "/etc/slurm/more.conf"
    assert configuration.parse("").value("x", "default") == "default"
    assert Configuration().number("KillWait", 30) == 30
    assert configuration.parse("KillWait=INFINITE").number("killwait", 30) == 65535


def test_the_gravest_comes_first() -> None:
    found = findings(seen("", "", ""))
    assert [each.verdict for each in found] == sorted(
        (each.verdict for each in found), key=lambda each: each != Verdict.FAIL
    )
    assert found[0].verdict is Verdict.FAIL
