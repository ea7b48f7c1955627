"""Training over several processes: FSDP2, tensor parallelism, meta-device initialization, SLURM, rendezvous."""
