#!/bin/bash
# A run on four nodes with eight GPUs each: one torchrun per node, which starts the processes again if one dies. When the
# time is nearly up, SLURM sends SIGTERM and the run saves a checkpoint. Submit the same script again to resume.
#SBATCH --job-name=wheat
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300

set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8
export LEAVEN_CACHE="${LEAVEN_CACHE:?a folder that all nodes see}"

srun --kill-on-bad-exit=1 --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 8 \
    --max-restarts 3 \
    --shutdown-timeout 280 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:29500" \
    --rdzv-id "$SLURM_JOB_ID" \
    -m leaven train "${1:?a recipe}" --run-folder "${2:?the folder of the run}"
