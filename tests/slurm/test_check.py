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
        ("Name=mps", "Name=other", "warn", "one_sharing"),
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
        ("ProctrackType", "BatchStartTimeout=4\nProctrackType", "warn", "BatchStartTimeout=4: Slurm requeues"),
        ("ProctrackType", "SelectTypeParameters=CR_Core,MULTIPLE_SHARING_GRES_PJ\nProctrackType", "fail", "spread"),
        ("Nodes=ALL", "Nodes=ALL OverSubscribe=EXCLUSIVE", "warn", "in partition main jobs have whole nodes"),
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
    pattern = changed(f"Prolog={HOOKS}/prolog", "Prolog=/etc/slurm/prolog.d/*")
    (found,) = findings(pattern)
    assert found.remedy == f"ln -s {HOOKS}/prolog /etc/slurm/prolog.d/, by a name that fits *"
    assert not findings(replace(pattern, scripts={"/etc/slurm/prolog.d/*": f"#!/bin/sh\n\n{HOOKS}/prolog"}))
    both = changed(f"Prolog={HOOKS}/prolog", f"Prolog={HOOKS}/prolog\nProlog=/etc/slurm/prolog.sh")
    assert "Prolog=/etc/slurm/prolog.sh does not call" in words(both)  # 22.05 runs the last one alone
    assert not findings(replace(both, version="26.05.5"))
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
    assert "mpsd.lua is that of another version" in words(replace(seen(), is_current=False))
    assert f"fail: {HOOKS}/prolog is not there" in words(replace(seen(), missing=("prolog",)))
    assert "fail: mpsd does not answer: no socket" in words(replace(seen(), unreachable="no socket"))
    assert "memory cannot be asked for" in words(replace(seen(), comment=False))
    assert "has not seen Slurm 27.11.1" in words(replace(seen(), version="27.11.1"))
    assert "version of Slurm is not known" in words(replace(seen(), version=""))
    assert "users may take out leases without Slurm" in words(replace(seen(), takes=True))
    alone = replace(seen(), one_user=True)
    assert "one user at a time" in words(alone)
    fitting = configuration.parse(SLURM.replace("Nodes=ALL", "Nodes=ALL ExclusiveUser=YES"), GRES, CGROUP)
    assert not findings(replace(alone, configuration=fitting))


def test_each_machine_is_judged_by_what_it_does() -> None:
    """A controller alone has neither hooks nor mpsd, and a node beside it has no job_submit.lua."""
    cluster = seen(f"SlurmctldHost=c1(10.0.0.1)\nSlurmctldHost=c2.example.org\n{SLURM}")
    for name in ("c1", "c2"):
        controller = replace(cluster, node=name, missing=("prolog",), unreachable="no socket", comment=False, gpus=None)
        assert not findings(controller)
        assert words(replace(controller, is_scripted=None)).startswith("warn: job_submit.lua does not call mpsd.lua:")
    (found,) = findings(replace(cluster, is_scripted=None))
    assert (found.verdict, found.remedy) == ("warn", "mpsctl slurm check on c1, c2, where slurmctld runs")
    both = replace(cluster, configuration=configuration.parse(f"SlurmctldHost=n1\n{SLURM}", GRES, CGROUP))
    assert "fail: Prolog believes comments" in words(replace(both, is_scripted=None))


def test_the_lines_of_install_need_no_check() -> None:
    """What install shows for a node has no findings, and keeps what the site had."""
    devices = [Device(f"/dev/nvidia{number}", 79 * GIB) for number in (0, 2)]
    site = "GresTypes=gpu,craynetwork\nJobSubmitPlugins=throttle\nPrologFlags=X11\nTaskPlugin=task/affinity\n"
    present = configuration.parse(site)
    for kind in ("mps", "shard"):
        slurm = [*lines.of_slurm("n1", devices, kind, HOOKS, present)]
        node = slurm[-1].partition("NodeName=n1 ... ")[2]
        assert node == f"Gres=gpu:2,{kind}:{2 * lines.PER_GPU[kind]},gpumem:{158 * 1024}M"
        text = "\n".join([*slurm, f"NodeName=n1 {node}", "PartitionName=main Nodes=ALL"])
        found = configuration.parse(text, "\n".join(lines.of_gres("n1", devices, kind)), CGROUP)
        assert found.words("GresTypes") == ["gpu", kind, "gpumem", "craynetwork"]
        assert found.words("JobSubmitPlugins") == ["throttle", "lua"]
        assert found.words("PrologFlags") == ["contain", "x11"]
        assert found.words("TaskPlugin") == ["task/affinity", "task/cgroup"]
        again = configuration.parse("\n".join([site, *slurm]))
        assert [*lines.of_slurm("n1", devices, kind, HOOKS, again)] == slurm
        gpus = frozenset({0, 2})
        assert not findings(Seen(configuration=found, version="26.05.5", grace=15, wait=15, node="n1", gpus=gpus))


def test_scripts_of_the_site_stay() -> None:
    """Slurm before 24.05 runs the last Prolog alone, and each version one TaskProlog and one HealthCheckProgram."""
    site = "Prolog=/etc/slurm/p.d/*.sh\nHealthCheckProgram=/usr/sbin/nhc\nHealthCheckInterval=300\n"
    present = configuration.parse(site)
    found = [*lines.of_slurm("n1", [Device("/dev/nvidia0", GIB)], "mps", HOOKS, present)]
    link = f"ln -s {HOOKS}/prolog /etc/slurm/p.d/"
    assert f"# Prolog=/etc/slurm/p.d/*.sh stays: {link}, by a name that fits *.sh" in found
    assert f"# HealthCheckProgram=/usr/sbin/nhc stays: call {HOOKS}/health in it" in found
    assert {"HealthCheckInterval=300", f"Epilog={HOOKS}/epilog"} <= {*found}


def test_reading() -> None:
    found = configuration.parse('A=1\na=2 B="x y" # C=3\nNodeName=n[1-2] Gres=gpu:tesla:2(S:0),mps:no_consume:100\n')
    assert (found.value("a"), found.value("b"), found.value("c")) == ("2", "x y", "")
    assert configuration.resources(found.nodes[0]["gres"]) == {"gpu": 2, "mps": 100}
    assert configuration.files("/dev/nvidia[0-2,05]") == [f"/dev/nvidia{each}" for each in ("0", "1", "2", "05")]
    assert configuration.files("r[1-2]n[01-02],x") == ["r1n01", "r1n02", "r2n01", "r2n02", "x"]
    assert configuration.files("n[,1-,-1,a,2]") == ["n2"]
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
