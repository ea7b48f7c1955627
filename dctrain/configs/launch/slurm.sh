#!/bin/bash
# A training run on many nodes that SLURM queues again until it is done:
#     sbatch configs/launch/slurm.sh dclm fit --config configs/lm/dcpythia_6b9.yaml
# Five minutes before its time is up the run saves and ends; the job is queued again and goes on.
#SBATCH --job-name=dcmha
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

srun python -m "$@" --name "$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume latest &
run=$!
trap 'kill -USR1 $run; wait $run; scontrol requeue "$SLURM_JOB_ID"' USR1
wait $run
