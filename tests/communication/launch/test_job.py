"""Jobs of plain Python processes: started together, ended together."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmdctx.cli.main import main
from spmdctx.communication.launch import Job, run_job
from spmdctx.communication.launch.environment import free_port, process_environment

SHOW = "import os; print(*(os.environ['SPMDCTX_' + name] for name in ('PROCESS_ID', 'NUM_PROCESSES', 'LOCAL_DEVICE_IDS', 'ADDRESS')))"
WHO = "import os, sys, time; who = int(os.environ['SPMDCTX_PROCESS_ID'])\n"


def run(code, count=2, **options):
    out, err = io.StringIO(), io.StringIO()
    start = time.monotonic()
    outcome = run_job(Job(["-c", code], count, **options), out, err)
    return outcome, out.getvalue(), err.getvalue(), time.monotonic() - start


def alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_each_process_is_told_who_it_is():
    outcome, out, _, _ = run(SHOW, 3, devices=2)
    assert outcome.code == 0
    rows = sorted(line.split() for line in out.splitlines())
    assert [row[:4] for row in rows] == [[f"[{n}]", str(n), "3", f"{2 * n},{2 * n + 1}"] for n in range(3)]
    assert len({row[4] for row in rows}) == 1
    assert rows[0][4].startswith("127.0.0.1:")


def test_output_has_the_number_of_its_process_on_its_own_stream():
    outcome, out, err, _ = run(WHO + "print('one\\ntwo'); print('trouble', file=sys.stderr); sys.stdout.write('no end')")
    assert outcome.trouble == ""
    assert sorted(out.splitlines()) == ["[0] no end", "[0] one", "[0] two", "[1] no end", "[1] one", "[1] two"]
    assert sorted(err.splitlines()) == ["[0] trouble", "[1] trouble"]


def test_the_first_failure_stops_the_others():
    outcome, _, _, seconds = run(WHO + "sys.exit(3) if who == 1 else time.sleep(60)", 3)
    assert outcome == (3, "Process 1 ended with exit code 3; the other 2 were stopped.")
    assert seconds < 30


def test_a_killed_process_is_named_with_its_signal():
    outcome, *_ = run(WHO + "os.kill(os.getpid(), 9) if who == 0 else time.sleep(60)")
    assert outcome == (137, "Process 0 was killed by SIGKILL; the other one was stopped.")


def test_processes_that_end_because_of_another_one_are_not_blamed():
    outcome, *_ = run(WHO + "sys.exit(76) if who == 0 else (time.sleep(0.5), sys.exit(5))")
    assert outcome == (5, "Process 1 ended with exit code 5.")


def test_a_job_that_takes_too_long_is_killed_with_all_that_it_started(tmp_path):
    file = str(tmp_path / "child")
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({file!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    outcome, _, _, seconds = run(code, 1, timeout_s=3)
    assert outcome == (124, "The job took more than 3 s: process 0 still ran, and all were stopped.")
    assert seconds < 30
    assert wait_until(lambda: not alive(int(Path(file).read_text())))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded(number):
    code = WHO + (
        "import os, signal\n"
        # A second signal may come while the first one is told.
        "def say(got, frame):\n    os.write(1, b'got %s\\n' % signal.Signals(got).name.encode()); os._exit(0)\n"
        "for one in (signal.SIGTERM, signal.SIGINT): signal.signal(one, say)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from spmdctx.communication.launch import Job, run_job; print(run_job(Job(['-c', {code!r}], 2)), flush=True)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines = [launcher.stdout.readline() for _ in range(2)]
        assert sorted(lines) == ["[0] ready\n", "[1] ready\n"]
        launcher.send_signal(number)
        rest, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.communicate()
    assert f"[0] got {number.name}" in rest
    assert f"[1] got {number.name}" in rest


def test_a_launcher_that_is_killed_takes_its_processes_with_it(tmp_path):
    child = (
        "import os, time; from spmdctx.communication.parent import die_with_launcher; die_with_launcher(os.environ)\n"
        f"open({str(tmp_path / 'child')!r} + os.environ['SPMDCTX_PROCESS_ID'], 'w').write(str(os.getpid())); time.sleep(60)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"from spmdctx.communication.launch import Job, run_job; run_job(Job(['-c', {child!r}], 2))"]
    )
    files = [tmp_path / f"child{number}" for number in range(2)]
    assert wait_until(lambda: all(path.exists() and path.read_text() for path in files), 60)
    pids = [int(path.read_text()) for path in files]
    assert all(alive(pid) for pid in pids)
    launcher.kill()
    launcher.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_job_may_be_run_by_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(run("print(1)", 1)[0]))
    thread.start()
    thread.join(60)
    assert found == [(0, "")]


def test_counts_of_cpu_devices_of_xla_are_taken_out():
    environ = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2", "PATH": "/bin"}
    found = process_environment(environ, 4000, 2, 1, 4)
    assert found["XLA_FLAGS"] == "--xla_a=1 --xla_b=2"
    assert (found["JAX_NUM_CPU_DEVICES"], found["PATH"], found["SPMDCTX_LAUNCHER"]) == ("4", "/bin", str(os.getpid()))


def test_a_free_port_can_be_listened_on():
    assert 1024 < free_port() < 65536


def test_the_command_runs_scripts_and_modules(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('script', sys.argv[1:])")
    assert main(["launch", "-n", "1", str(script), "--own", "x"]) == 0
    assert capsys.readouterr().out == "[0] script ['--own', 'x']\n"
    assert main(["launch", "-n", "1", "-m", "timeit", "-n", "1", "-r", "1", "pass"]) == 0
    assert "[0] 1 loop" in capsys.readouterr().out


def test_the_command_says_what_went_wrong(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    assert main(["launch", "--json", "-n", "2", str(script)]) == 7
    written = capsys.readouterr()
    assert '"exit_code": 7' in written.out
    assert "error: Process 0 ended with exit code 7" in written.err


def test_a_bad_number_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "-n", "0", "x.py"])
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x.py"], "needs a number of processes"),
        (["-n", "2"], "needs a script"),
        (["--servers", "2", "x.py"], "needs both numbers"),
        (["-n", "2", "--servers", "2", "--workers", "2", "x.py"], "needs both numbers, and no -n"),
    ],
)
def test_what_is_missing_is_named(arguments, words, capsys):
    assert main(["launch", *arguments]) == 2
    assert words in capsys.readouterr().err
