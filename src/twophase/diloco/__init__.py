"""The DiLoCo engine: replicas, rounds and what travels between them (torch.distributed lives here)."""
