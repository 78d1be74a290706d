"""A live worker without a workload (tests only): ``live_worker.py NAME DO FOLDER ...``.

It logs its turns, and the ticks of a thread that never rests, to ``FOLDER/NAME.json``. DO is
rounds, slices, stages, long, deaf, ctrl_z, fork, kill, hang, old or garbage. With fork the ticks
are those of a child in a session of its own. With long it exchanges a megabyte; with deaf it
reads only the first byte of what it is sent then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from labkit.experiment.worker.turn_protocol import VERSION, Channel
from labkit.experiment.worker.worker_status import WorkerStatus
from labkit.machine.processes import parent_death
from labkit.machine.worker_environment import TAKES_TURNS

PARTS = [["a", 6], ["b", 3]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs=3)
    for name in ("turns", "parent", "lifeline", "spawned"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    name, do, folder = options.words
    if do != "hang":  # it depends on the cleanup process alone
        parent_death.watch_parent(options.parent, options.lifeline)
    channel = Channel(socket.socket(fileno=options.turns))
    status, start = WorkerStatus.from_environment(), time.monotonic()
    log = {"stopped_s": None, "turns": [], "ticks": [], "gathered": None}
    log["takes_turns"] = TAKES_TURNS in os.environ
    if do == "fork":
        child = [sys.executable, __file__, "child", folder, name]
        subprocess.Popen(child, start_new_session=True)
        ticks = Path(folder, f"{name}.ticks")
        while not (ticks.exists() and ticks.stat().st_size):  # a busy machine starts it late
            time.sleep(0.01)
    else:
        threading.Thread(target=tick, args=(log["ticks"],), daemon=True).start()
    if do == "garbage":
        os.write(options.turns, b"not a message\n")
    channel.send("hello", VERSION + (do == "old"))
    channel.expect("probe")
    channel.send("probed")
    channel.expect("load")
    log["loaded"] = [time.monotonic()]
    time.sleep(0.2)
    log["loaded"].append(time.monotonic())
    channel.send("loaded")
    channel.expect("warm_up")
    if do == "slices":
        slices(channel, log, count=len(name))
    elif do in ("stages", "long", "deaf"):
        rounds(channel, log, do)
        channel.send("values", [name if do == "stages" else name * (1 << 20)])
        if do == "deaf":
            os.read(options.turns, 1)
            hang()
        _, log["gathered"] = channel.expect("gathered")
        rounds(channel, log, do)
    else:
        rounds(channel, log, do)
    if do == "fork":
        log["ticks"] = [float(at) for at in Path(folder, f"{name}.ticks").read_text().split()]
    log["stopped_s"], log["alive_s"] = status.stopped_s(), time.monotonic() - start
    Path(folder, f"{name}.json").write_text(json.dumps(log))
    os._exit(0)


def child(folder: str, name: str) -> None:
    """Write the time to a file without end; a worker's child in a session of its own."""
    with Path(folder, f"{name}.ticks").open("w", buffering=1) as ticks:
        while True:
            ticks.write(f"{time.monotonic()}\n")
            time.sleep(0.0005)


def tick(ticks: list[float]) -> None:
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.0005)


def turn(log: dict, what) -> None:
    start = time.monotonic()
    time.sleep(0.005)
    log["turns"].append([start, time.monotonic(), what])


def hang() -> None:
    if "LABKIT_TEST_HANGS" in os.environ:
        Path(os.environ["LABKIT_TEST_HANGS"]).touch()
    time.sleep(3600)


def rounds(channel: Channel, log: dict, do: str) -> None:
    channel.send("parts", PARTS)
    while (message := channel.expect("turn", "end"))[0] == "turn":
        if len(log["turns"]) == 1 and do == "ctrl_z":
            os.kill(os.getppid(), signal.SIGTSTP)
        turn(log, message[1])
        if len(log["turns"]) == 2 and do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(log["turns"]) == 2 and do == "hang":
            hang()
        channel.send("done")


def slices(channel: Channel, log: dict, count: int) -> None:
    channel.send("slices")
    for number in range(count):
        _, seconds = channel.expect("turn")
        turn(log, seconds)
        if number < count - 1:
            channel.send("done")
    channel.send("values", [f"{count} turns"])
    _, log["gathered"] = channel.expect("gathered")


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1] == "child" else main()
