#!/bin/sh
# Submit a job to SLURM, wait for its end, and return its exit code. If leaven or Ctrl-C ends this script, the job is
# cancelled. In a command file: command = "sh submit.sh {out}/log job.sh --lr {lr} --seed {seed}" and
# loss.file = "{out}/log"
output=$1
shift
cancel() {
    trap '' INT TERM # scancel inherits this
    until [ -s "$output.id" ] || ! kill -0 $!; do sleep 0.1; done
    scancel "$(cut -d ";" -f 1 "$output.id")"
    kill -KILL $! # it looks at the job every few seconds only
    exit 143
}
: > "$output.id"
# A signal would end sbatch, perhaps before it has said the number of the job, and leave the job in the queue.
(trap '' INT TERM; exec sbatch --parsable --wait --output="$output" "$@" > "$output.id") &
trap cancel INT TERM
wait $!
