"""The script examples/slurm.sh, with stand-ins for the commands of SLURM and for torchrun."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.cli.conftest import Verb
from torch.distributed.run import parse_args

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
STAND_INS = {
    "scontrol": "#!/bin/sh\nprintf 'node-7\\nnode-8\\n'",
    "srun": '#!/bin/sh\necho "$1 $2 $3" > srun.txt\nshift 3\nexec "$@"',
    "torchrun": "#!/bin/sh\nprintf '%s\\n' \"$@\"",
}


def test_the_job_script_starts_a_run_of_all_gpus(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaven: Verb
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bin").mkdir()
    for name, script in STAND_INS.items():
        Path("bin", name).write_text(script)
        Path("bin", name).chmod(0o755)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SCRIPT.read_text(), re.MULTILINE))
    job = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_NNODES": asked["nodes"],
        "SLURM_CPUS_PER_TASK": asked["cpus-per-task"],
    }
    tiny_file.write_text(tiny_file.read_text().replace("tokens = 10_240", "tokens = 2_560"))
    start = ["bash", str(SCRIPT), str(tiny_file), "runs/wheat"]
    environment = {key: value for key, value in os.environ.items() if key != "LEAVEN_CACHE"} | job
    refused = subprocess.run(start, env=environment, capture_output=True, text=True, check=False)
    assert "a folder that all nodes see" in refused.stderr
    started = subprocess.run(start, env=os.environ | job, capture_output=True, text=True, check=True)
    found = vars(parse_args(started.stdout.splitlines()))
    assert Path("srun.txt").read_text() == "--kill-on-bad-exit=1 --cpus-per-task 64\n"
    assert (found["nnodes"], found["nproc_per_node"]) == (asked["nodes"], asked["gpus-per-node"])
    assert (found["rdzv_backend"], found["rdzv_endpoint"], found["rdzv_id"]) == ("c10d", "node-7:29500", "42")
    assert found["shutdown_timeout"] < int(asked["signal"].removeprefix("TERM@"))
    assert (found["module"], found["training_script"]) == (True, "leaven")
    code, out, err = leaven(*found["training_script_args"])
    assert code == 0, out + err
    assert (tmp_path / "runs" / "wheat" / "metrics.jsonl").is_file()
