"""Lengths measured on a cluster of Ray: those of one process, whatever the cluster loses."""

import json
import os
import re
import signal
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import attrs
import psutil
import pytest

from packplan.adapters.ranks.ray_executor import RayExecutor
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.app import measure, sft
from packplan.app.opening.runs import measured_by_ray, read_config
from packplan.app.plan import __main__ as plan
from packplan.core.config.run import HostCommand
from packplan.core.errors import ConfigError
from tests.e2e.ready import artefacts_of, chats
from tests.processes import ROOT, descendants, end
from tests.records import write_lines

pytestmark = pytest.mark.slow

AT_URLS = (9, 25)
"""Records of the demo whose image is at a URL here."""


@pytest.fixture(scope="module")
def cluster(ray_folder):
    """Return the address of a cluster of two nodes with one core each, which this process joins."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            started.add_node(num_cpus=1)
    ray.init(started.address, log_to_driver=False)
    yield started.address
    ray.shutdown()
    left = descendants(os.getpid())
    started.shutdown()
    end([one for one in left if str(ray_folder) in " ".join(one.cmdline() if one.is_running() else ())])


class Pictures(SimpleHTTPRequestHandler):
    """Serves files; what a test asks for happens once, before the first answer of a path."""

    def do_GET(self):
        if happens := self.server.happens.pop(self.path, None):
            happens(asking_process(self.client_address[1]))
        super().do_GET()

    def log_message(self, *_):
        """Say nothing."""


def asking_process(port: int) -> psutil.Process:
    """Return the process of this machine that has connected from a port."""
    (pid,) = {one.pid for one in psutil.net_connections("tcp") if one.laddr.port == port and one.pid != os.getpid()}
    return psutil.Process(pid)


@pytest.fixture
def pictures(demo):
    """Return a server of the demo's files, whose answers a test may precede by `happens`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Pictures, directory=str(demo / "data")))
    server.happens = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def scenes(demo, pictures):
    """Return a file of the demo's texts and images, some at URLs, and the paths of these."""
    records, paths = [json.loads(line) for line in (demo / "data" / "train.jsonl").read_text().splitlines()], []
    for index in AT_URLS:
        name = records[index]["images"][0]
        paths.append(f"/{name}")
        records[index]["images"][0] = f"http://127.0.0.1:{pictures.server_port}/{name}"
    yield write_lines(data := demo / "data" / "urls.jsonl", records), paths
    data.unlink()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Let few records be several blocks."""
    monkeypatch.setattr(RayExecutor, "block_size", 4)


@pytest.fixture
def build(write_run, tmp_path, capfd):
    """Return a function that builds a plan, and returns its files, or what it said if it failed."""

    def run(name, *words, of="qwen2_5_vl", status=0, **sections):
        sections.setdefault("custom", {}).setdefault("media_cache", str(tmp_path / f"{name} media"))
        capfd.readouterr()
        assert status == plan.main(["build", str(write_run(of, name=name, **sections)), *words])
        return " ".join(capfd.readouterr().err.split()) if status else artefacts_of(tmp_path / name)

    return run


def test_a_lost_process_and_a_lost_node_change_no_byte(cluster, build, scenes, pictures):
    """Each is killed in the middle of a block, which another one measures."""
    data, (first, second) = scenes
    lost = []

    def kill_process(one):
        lost.append(one.name())
        one.kill()

    def kill_node(one):
        raylet = one.parent()
        lost.append(raylet.name())
        raylet.kill()

    alone = build("alone", custom={"train_jsonl": str(data)})
    pictures.happens = {first: kill_process, second: kill_node}
    found = build("together", "--ray", cluster, custom={"train_jsonl": str(data)})

    assert alone == found
    assert {} == pictures.happens
    assert ["ray::_measure_on", "raylet"] == [name[:16] for name in lost]


def test_ctrl_c_keeps_what_was_measured_and_the_next_start_goes_on(cluster, build, monkeypatch, tmp_path):
    """Pressed while blocks are measured; the cluster measures only what is missing."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in its background
    custom = {"train_jsonl": str(write_lines(tmp_path / "chats.jsonl", chats(40)))}
    alone, plain, received = build("alone", of="qwen2", custom=dict(custom)), RayExecutor._receive, []

    def receive(executor, call):
        received.append(call)
        if len(received) == 4:
            signal.raise_signal(signal.SIGINT)
        return plain(executor, call)

    monkeypatch.setattr(RayExecutor, "_receive", receive)
    said = build("two", "--ray", cluster, of="qwen2", status=130, custom=dict(custom))
    kept = DiskLengthStore(tmp_path / "two" / "static_packing" / "train").inspect().rows.table
    assert alone == build("two", "--ray", cluster, of="qwen2", custom=dict(custom))

    assert "interrupted: measured lengths" in said
    assert 3 * RayExecutor.block_size == len(kept)
    assert 10 + 1 == len(received), "all blocks once, and the one that was waited for"


def test_bad_records_are_those_of_one_process(cluster, build, tmp_path):
    """Left out with the same reasons and places; the first one ends a run that skips none."""
    image = {"query": "look", "response": "no", "images": ["none.png"]}
    rows = [*chats(9), {"query": "no answer"}, *chats(9, first=9), image]
    data = write_lines(tmp_path / "bad.jsonl", rows)
    skip = {"train_jsonl": str(data), "on_bad_record": "skip", "max_bad_share": "0.5"}
    assert build("alone", of="qwen2", custom=skip) == build("together", "--ray", cluster, of="qwen2", custom=skip)

    stop = {"train_jsonl": str(data)}
    said = [build(f"stop{len(words)}", *words, of="qwen2", status=2, custom=stop) for words in ((), ("--ray", cluster))]
    assert said[0].split("error: ")[1] == said[1].split("error: ")[1]
    assert f"{data}, line 10: " in said[1]


@pytest.mark.parametrize("what", ["data", "image", "model"])
def test_what_a_node_cannot_read_is_named_with_the_node(cluster, build, demo, tmp_path, what):
    """A file that this process alone can open: by its own descriptor."""
    image, own = next((demo / "data" / "images").iterdir()), f"/proc/self/fd/{OWN}"
    rows = [{**one, "images": [own if what == "image" else str(image)]} for one in chats(5)]
    data = write_lines(tmp_path / "data.jsonl", rows)
    files = {"data": data, "image": image, "model": demo / "models" / "qwen2_5_vl"}
    custom = {"train_jsonl": own if what == "data" else str(data)}
    opened = os.open(files[what], os.O_RDONLY)
    os.dup2(opened, OWN)
    try:
        model = {"model": {"model": own}} if what == "model" else {}
        said = build("run", "--ray", cluster, status=2, custom=custom, **model)
    finally:
        os.close(OWN)
        os.close(opened)

    assert re.search(rf"error: node [\d.]+(:| cannot measure:) .*{own}", said), said


OWN = 987
"""Number of a descriptor that no process of Ray has."""


def test_a_table_measured_by_a_cluster_is_that_of_one_process(cluster, demo, scenes, tmp_path):
    """Byte for byte."""
    words = [str(scenes[0]), "--model", str(demo / "models" / "qwen2_5_vl")]
    for name, more in (("alone", ()), ("together", ("--ray", cluster))):
        assert 0 == measure.main([*words, "-o", str(tmp_path / f"{name}.parquet"), *more])

    assert (tmp_path / "alone.parquet").read_bytes() == (tmp_path / "together.parquet").read_bytes()


def test_a_cluster_that_is_not_done_in_time_is_left(cluster, build, scenes, pictures):
    """With the key that allows it more time."""
    # Late among these tests: the process ends, and another one takes 9 s to import the stack.
    data, (first, _) = scenes
    done = threading.Event()
    pictures.happens = {first: lambda _: done.wait()}
    try:
        limits = {"packing_wait_timeout_s": 1}
        said = build("late", "--ray", cluster, status=2, custom={"train_jsonl": str(data)}, training=limits)
    finally:
        done.set()

    assert "error: no block was measured within 1 s (training.packing_wait_timeout_s)" in said


def test_where_no_cluster_can_measure_the_option_says_so(write_run, capfd):
    """A word behind it that is no address, and a command of ms-swift."""
    with pytest.raises(SystemExit):
        plan.main(["build", "--ray", str(write_run("qwen2"))])
    assert "is not an address: write --ray=auto, or put --ray last" in capfd.readouterr().err

    command = HostCommand(
        task="sft", words=(), world_size=1, task_type="causal_lm", sequences_per_row=1, length_inputs={}
    )
    config = attrs.evolve(read_config(write_run("qwen2")), command=command)
    with pytest.raises(ConfigError, match=r"--ray .* not with an ms-swift command"):
        measured_by_ray(config, "auto")


def test_training_joins_the_cluster_for_its_lengths_alone(cluster, write_run, monkeypatch, capfd):
    """By the key and RAY_ADDRESS; the last test here, since this process leaves the cluster."""
    import ray

    ray.shutdown()
    by_ray = {"packing_length_measured_by": "ray", "dataloader_num_workers": 1}
    by_ray |= {"max_steps": 1, "packing_drop_last": False}
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setenv("MAX_RATIO", "150")  # the nodes measure with it, too
    assert 0 == sft.main([str(write_run("qwen2", training=by_ray))])
    assert "measuring on a Ray cluster: " in capfd.readouterr().err
    assert not ray.is_initialized()

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert 2 == sft.main([str(write_run("qwen2", name="none", training=by_ray))])
    assert "error: no Ray cluster can be joined at 127.0.0.1:1: " in capfd.readouterr().err
