"""Servers as the chart starts them: the default with its volume, and two replicas on one database."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memstream
from tests.server.conftest import check_log
from tests.server.listing import contents
from tests.server.test_health import probed
from tests.support.server import ServerProcess, free_address
from tests.toolchains import deploying
from tests.toolchains.charts import Container, render_objects
from tests.toolchains.fleet import Fleet
from tests.toolchains.milvus import MilvusServer
from tests.toolchains.programs import Absent

pytestmark = pytest.mark.toolchain

HOST = "memory.agents.svc"


@pytest.fixture(autouse=True, scope="module")
def _programs() -> None:
    try:
        deploying.build_helm()
    except Absent as absent:
        pytest.skip(str(absent))


def connect(server: ServerProcess, container: Container) -> memstream.Client:
    """Connects as NOTES.txt says, except for the host name: there is no Service."""
    ca = container.text("Secret", "memory-tls", "ca.crt").encode()
    key = container.text("Secret", "memory-access", "api-key")
    named = [("grpc.ssl_target_name_override", HOST)]
    return memstream.connect(
        server.address.replace("0.0.0.0", "127.0.0.1"),
        token=key,
        tls=memstream.Tls(root_certificates=ca),
        timeout_s=60.0,
        options=named,
    )


class Pod:
    """The server of the default values, on a local volume."""

    def __init__(self, folder: Path) -> None:
        self.container = Container(render_objects({}, folder))
        volume = folder / "data"
        volume.mkdir(mode=0o2775)
        (volume / "lost+found").mkdir()
        self.volume, self.metrics = volume, free_address()
        self.settings = self.container.settings(folder)
        assert self.container.server["args"] == ["serve"]
        assert (self.settings.pop("listen"), self.settings.pop("metrics_listen")) == ("0.0.0.0:7700", "0.0.0.0:9100")
        directory = Path(self.settings.pop("data_dir"))
        assert self.settings.pop("http_listen") == "0.0.0.0:7701"
        own = {"metrics_listen": self.metrics, "http_listen": free_address()}
        settings: dict[str, str | float] = {**own, "journal_url": "", **self.settings}
        self.server = ServerProcess(directory, "0.0.0.0:0", **settings)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path)
    yield made
    made.server.kill()
    check_log(made.server)


async def test_the_default_serves_and_keeps_data_after_a_restart(pod: Pod) -> None:
    pod.server.start()
    assert probed(pod.metrics) == {"livez": 200, "readyz": 200}
    async with connect(pod.server, pod.container) as client:
        joy = await client.create_memory("comedy/joy")
        await joy.observe_batch(["bees on the roof"])
    assert pod.server.stop() == 0
    pod.server.start()
    async with connect(pod.server, pod.container) as client:
        joy = client.memory("comedy/joy")
        assert (await joy.recall_once("bees")).recollections[0].fragment.content == "bees on the roof"
    assert pod.server.stop() == 0
    names = sorted(path.name for path in pod.volume.iterdir() if path.suffix != ".process")  # written by the test
    assert names == ["lost+found", "memstream"]
    assert "insecure" not in pod.server.log()


async def test_the_default_rejects_callers_without_a_key(pod: Pod) -> None:
    pod.server.start()
    address = pod.server.address.replace("0.0.0.0", "127.0.0.1")
    ca = pod.container.text("Secret", "memory-tls", "ca.crt").encode()
    async with memstream.connect(address, tls=memstream.Tls(root_certificates=ca), timeout_s=60.0) as client:
        with pytest.raises(memstream.Unauthenticated):
            await client.create_memory("comedy/joy")
    async with memstream.connect(address, timeout_s=5.0) as client:
        with pytest.raises((memstream.Unavailable, memstream.DeadlineExceeded)):
            await client.server_info()


def test_healthcheck_reads_the_settings_of_the_chart(pod: Pod) -> None:
    pod.server.start()
    variables = {f"MEMSTREAM_{name.upper()}": text for name, text in pod.settings.items()}
    command = [sys.executable, "-m", "memstream_server", "healthcheck", "--listen", pod.server.address]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def test_replicas_of_the_chart_forward_calls(fleet: Fleet, milvus: MilvusServer, tmp_path: Path) -> None:
    """With the chart's certificate, CA, name, API key and peer secret."""
    values = {"mode": "replicated", "journal": {"url": fleet.url}, "milvus": {"uri": milvus.uri}}
    container = Container(render_objects(values, tmp_path))
    settings = container.settings(tmp_path)
    for name in ("listen", "http_listen", "metrics_listen", "advertise", "data_dir"):  # each pod has its own address
        del settings[name]
    owner, other = (fleet.make(**settings, http_listen=free_address()).start() for _ in range(2))
    async with connect(owner, container) as client:
        await (await client.create_memory("comedy/joy")).observe_batch(["bees on the roof"])
    async with connect(other, container) as client:
        joy = client.memory("comedy/joy")
        assert (await joy.recall_once("bees")).recollections[0].fragment.content == "bees on the roof"
        await joy.observe_batch(["a train to Ulm"])
        assert sorted(await contents(joy)) == ["a train to Ulm", "bees on the roof"]
    assert fleet.epoch("joy") == 1  # the owner has answered every call
