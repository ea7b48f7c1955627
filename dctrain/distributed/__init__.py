"""Training over several processes: FSDP2, tensor parallelism, deferred initialization, SLURM, rendezvous."""
