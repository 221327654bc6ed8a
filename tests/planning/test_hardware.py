import re
from dataclasses import replace
from pathlib import Path

import pytest

from leaven.documents.planning import Price
from leaven.errors import InputError
from leaven.planning.accelerators import CONFIDENCE, EXAMPLE, accelerators, user_file
from leaven.planning.cost import cluster_cost, parse_price
from leaven.planning.hardware import Cluster, find_accelerator, known_device, parse_cluster


@pytest.fixture(autouse=True)
def no_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEAVEN_ACCELERATORS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.mark.parametrize(
    ("text", "gpus", "name", "node"),
    [
        ("384xA100-80GB", 384, "A100-SXM-80GB", 8),
        ("1_024 x h100", 1024, "H100-SXM-80GB", 8),
        ("1,024xh100", 1024, "H100-SXM-80GB", 8),
        ("8xH100-PCIe", 8, "H100-PCIe-80GB", 8),
        ("2×H200", 2, "H200-SXM-141GB", 8),
        ("16x4xA100-80GB", 64, "A100-SXM-80GB", 4),
        ("256xTPU v5e", 256, "TPUv5e-16GB", 256),
        ("12xA100", 12, "A100-SXM-80GB", 6),  # two nodes of 6, not one of 8 and one of 4
        ("13xA100", 13, "A100-SXM-80GB", 8),  # nothing divides it: 8 and 5
    ],
)
def test_a_cluster_is_count_x_name(text: str, gpus: int, name: str, node: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.gpus, cluster.accelerator.name, cluster.accelerator.node_size) == (gpus, name, node)
    assert parse_cluster(str(cluster)) == cluster


def test_nodes_of_a_cluster() -> None:
    texts = [parse_cluster(text).nodes_text for text in ("64xH100", "12xH100", "13xH100", "7xH100")]
    assert texts == ["8 nodes of 8", "2 nodes of 6", "2 nodes of 8, the last of 5", "one node"]


def test_cpu_is_this_machine_and_marked_as_a_guess() -> None:
    cluster = parse_cluster("cpu")
    assert (cluster.gpus, str(cluster)) == (1, "cpu")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        total = re.search(r"MemTotal:\s+(\d+) kB", meminfo.read_text())
        assert cluster.accelerator.memory_gib == pytest.approx(int(total[1]) / 2**20, abs=0.06)
    assert {source.confidence for source in cluster.accelerator.sources} == {"guess"}
    assert cluster.accelerator.peak("bf16") == cluster.accelerator.peak("fp32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "is not a cluster; write for example 64xH100-80GB")
            for text in ("64", "H100x8", "-8xH100", "8x8x8xH100", "0xH100", "8x0xH100", "2xcpu", "1,5xH100")
        ),
        ("8xabacus", r"no accelerator 'abacus' in the table; the nearest are [^,]*(, [^,]+){2} \(leaven hardware"),
    ],
)
def test_bad_clusters_are_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_cluster(text)


def test_an_unknown_accelerator_names_similar_ones_and_how_to_add_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"table; the nearest are H100-SXM-80GB, ") as refused:
        find_accelerator("H100-SXM-81GB")
    # The example line of the message defines the accelerator if it is put into the file.
    path, line = re.search(
        r"put a line like this example into (\S+), with its own numbers: (.*)$", str(refused.value)
    ).groups()  # type: ignore[union-attr]
    assert path == str(user_file())
    written = tmp_path / "mine.toml"
    written.write_text(line)
    monkeypatch.setenv("LEAVEN_ACCELERATORS", str(written))
    assert find_accelerator("H100-SXM-81GB").peak_tflops == 400


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA GH200 480GB", "GH200-141GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", None),
        ("cpu", None),
    ],
)
def test_a_driver_s_name_is_known_or_none(driver: str, name: str | None) -> None:
    found = known_device(driver)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("name", "flops_a_clock", "ghz"),
    [
        # FLOPs of a multiprocessor in a clock, and the boost clock, from the architecture papers.
        ("V100", 8 * 64 * 2, 1.530),
        ("A100", 4 * 256 * 2, 1.410),
        ("H100", 4 * 512 * 2, 1.830),
        ("H100-PCIe", 4 * 512 * 2, 1.620),
        ("MI300X", 4 * 256 * 2, 2.100),
        ("MI250X", 4 * 256, 1.700),
        ("RTX-4090", 4 * 64 * 2, 2.520),
        ("L4", 4 * 128 * 2, 2.040),
        ("A10", 4 * 128 * 2, 1.695),
    ],
)
def test_the_peak_is_that_of_its_multiprocessors(name: str, flops_a_clock: float, ghz: float) -> None:
    found = find_accelerator(name)
    assert found.peak_tflops == pytest.approx(found.multiprocessors * flops_a_clock * ghz / 1e3, rel=0.04)


def test_every_number_has_a_source_and_says_how_sure_it_is() -> None:
    assert len(accelerators()) >= 30
    for accelerator in accelerators().values():
        at = {source.group: source for source in accelerator.sources}
        assert {"peak", "memory", "board", "link", "network"} <= at.keys()
        assert ("matmul" in at) is bool(accelerator.matmuls)
        for source in at.values():
            assert source.confidence in {"vendor", "read", "memory"}
            assert source.confidence in CONFIDENCE
            assert len(source.text) > 5
            # unverified numbers name a kind of source, all others a page
            assert (source.confidence == "memory") is source.text.startswith(
                ("data sheet", "the usual NIC", "not pub")
            )


def test_rates_are_dense_and_of_one_board() -> None:
    # Measured: 87% (A100), 80% (H100), 78% (B200); a sparse peak entered by mistake would halve it.
    for accelerator in accelerators().values():
        assert 0.5 < accelerator.matmul_flops / (accelerator.peak_tflops * 1e12) < 1
        rates = dict(accelerator.peaks)
        assert accelerator.peak("fp32") is None or rates["fp32"] < accelerator.peak_tflops
        assert accelerator.peak("tf32") is None or rates["tf32"] <= accelerator.peak_tflops
        assert accelerator.peak("fp8") is None or 1 <= rates["fp8"] / accelerator.peak_tflops < 2.1
        assert accelerator.network_gb_s <= accelerator.link_gb_s
    a100, h100 = find_accelerator("A100"), find_accelerator("H100")
    assert a100.matmul_flops / 312e12 == pytest.approx(0.87, abs=0.005)
    assert h100.matmul_flops / 989e12 == pytest.approx(0.80, abs=0.005)
    assert (h100.matmul("fp8"), h100.matmul("bf16")) == (1402.6, 794.5)
    assert h100.matmul("fp32") == pytest.approx(0.8 * 67)
    # what large products are planned at: a share of the best matmul, or what was measured
    assert h100.document().planned_tflops == pytest.approx(0.9 * 794.5)
    assert find_accelerator("B200").document().planned_tflops == pytest.approx(1087)
    assert a100.peak("fp8") is None
    assert a100.matmul("fp8") is None
    v100 = find_accelerator("V100")  # no bf16: fp16 is planned
    assert (v100.peak("bf16"), v100.peak("fp16"), v100.peak_tflops) == (None, 125, 125)


MINE = """
[sources]
bench = "nccl-tests, all_reduce, 8 GB"

[H100-SXM-80GB]
network = { gb_s = 12.5, source = "bench" }

[Z9-64GB]
peak = { fp16 = 400, fp8 = 800 }
memory = { gib = 64, tb_s = 2 }
board = { power_w = 500 }
link = { gb_s = 300, node = 16 }
network = { gb_s = 25 }
"""


def test_a_user_adds_accelerators_and_corrects_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "config" / "leaven"
    folder.mkdir(parents=True)
    (folder / "accelerators.toml").write_text(MINE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    mine = parse_cluster("32xz9").accelerator
    assert (mine.name, mine.peak_tflops, mine.power_w, mine.node_size) == ("Z9-64GB", 400, 500, 16)
    assert mine.matmul_flops == pytest.approx(320e12)
    assert {(each.text, each.confidence) for each in mine.sources} == {(str(folder / "accelerators.toml"), "yours")}
    corrected = find_accelerator("H100")
    assert (corrected.network_gb_s, corrected.link_gb_s, corrected.matmul_flops) == (12.5, 450, 794.5e12)
    network = next(source for source in corrected.sources if source.group == "network")
    assert (network.text, network.confidence) == ("nccl-tests, all_reduce, 8 GB", "yours")
    assert list(accelerators())[-1] == "Z9-64GB"
    assert known_device("ACME Z9 64GB") == mine
    assert Cluster(64, corrected) == parse_cluster("64xH100")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            f"Z9 = {EXAMPLE.replace('gib = 64', 'gib = -1')}",
            "Z9: [memory] gib: input should be greater than 0, not -1",
        ),
        (f"Z9 = {EXAMPLE.replace('bf16', 'fp8')}", "has neither bf16 nor fp16"),
        (f"Z9 = {EXAMPLE[:-1]}, matmul = {{ bf16 = 500 }} }}", "matmul.bf16: 500 TFLOP/s is above the peak of 400"),
        ("[Z9]\npeak = { bf16 = 400 }", "Z9: memory: missing"),
        ("Z9 = 3", "[Z9] is not an accelerator"),
        ("Z9", "not TOML"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    monkeypatch.setenv("LEAVEN_ACCELERATORS", str(path))
    with pytest.raises(InputError) as refused:
        parse_cluster("8xH100")
    assert str(path) in str(refused.value)
    assert says in str(refused.value)
    assert str(refused.value).endswith(f"write an accelerator as in this example: Z1-64GB = {EXAMPLE}")


def test_a_file_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, says in ((tmp_path / "absent.toml", "no such file; create it, or unset"), (tmp_path, "cannot be read")):
        monkeypatch.setenv("LEAVEN_ACCELERATORS", str(path))
        with pytest.raises(InputError, match=says):
            parse_cluster("8xH100")


@pytest.mark.parametrize("link", ["config", "config/leaven", "config/leaven/accelerators.toml"])
def test_a_file_behind_a_link_to_a_missing_disk_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "disk")
    with pytest.raises(InputError, match=rf"{link} is a link to .*disk, which is missing"):
        parse_cluster("8xH100")
    (tmp_path / "disk").write_text(MINE) if link.endswith("toml") else (tmp_path / "disk").mkdir()
    assert parse_cluster("8xH100").accelerator.memory_gib == 80  # an empty folder at the end of a link has no file


def test_cost_of_64_boards_of_700_w_for_a_fortnight() -> None:
    found = cluster_cost(parse_cluster("64xH100"), 14 * 86_400, Price(amount=2.5))
    assert found.days == 14
    assert found.gpu_hours == 14 * 24 * 64 == 21_504
    assert found.energy_kwh == pytest.approx(21_504 * 0.7)
    assert found.money == 53_760
    unknown = cluster_cost(Cluster(4, replace(parse_cluster("4xH100").accelerator, power_w=None)), 3_600)
    assert (unknown.energy_kwh, unknown.money, unknown.gpu_hours) == (None, None, 4)


def test_prices_are_parsed() -> None:
    prices = {"2.5": (2.5, ""), " € 2.20 ": (2.2, "€"), "2.2 EUR": (2.2, "EUR"), "USD 2.2": (2.2, "USD")}
    prices |= {".9": (0.9, ""), "₹200": (200, "₹")}
    for text, (amount, currency) in prices.items():
        assert parse_price(text) == Price(amount=amount, currency=currency)
    for text in (
        "",
        "free",
        "-2",
        "2,5",
        "nan",
        "2.5k",
        "2 M",
        "$2k",
        "2.5k€",
        "2k$",
        "2.5 M€",
        "2€k",
        "k2.5",
        "M€2",
        "$k2",
        "2.5/M",
        "20 kr",
        "/2",
    ):
        with pytest.raises(InputError, match="give a number, and a currency as a sign or three capital letters"):
            parse_price(text)
