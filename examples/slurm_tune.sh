#!/bin/bash
# A study on a cluster: every task of the array is one `leaven tune` on a node, with a worker for each of its GPUs. They
# share the study, and any of them may be killed. When the time is nearly up, SLURM sends SIGTERM and the trials that
# run are returned to the study. Submit the same script again to resume:
#   sbatch examples/slurm_tune.sh study.toml /shared/studies/gpt 64
#SBATCH --job-name=tune
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@300

set -euo pipefail

# Not srun: the task is the script itself, which leaven replaces, so that the signal reaches it.
exec leaven tune "${1:?a recipe or a command file}" \
    --study "${2:?a folder that all nodes see, or a database}" \
    --trials "${3:-64}" \
    --workers auto
