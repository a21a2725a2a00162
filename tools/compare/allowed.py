"""Cases that may differ, and why: what the rewrite does not promise to keep, or holds by another measure."""

MAY_DIFFER: dict[str, str] = {
    "engine adamw by name": "torch.optim.AdamW: state by its names, reports without angles",
    "engine muon by name": "torch.optim.Muon: state by its names, reports without angles",
    "compressed *": "one residual a sender: the bits of one process and of gloo agree",
}
"""Reason by pattern of case names. What such a case returns under "must" is compared all the same."""
