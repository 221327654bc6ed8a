#!/bin/sh
# Submit a job to SLURM, wait for its end, and return its exit code. If leaven ends this script, the job is cancelled.
# In a command file: command = "sh submit.sh {out}/log job.sh --lr {lr} --seed {seed}" and loss.file = "{out}/log"
output=$1
shift
sbatch --parsable --wait --output="$output" "$@" > "$output.id" &
trap 'scancel "$(cut -d ";" -f 1 "$output.id")"; exit 143' TERM
wait $!
