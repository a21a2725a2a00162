"""Cases that may differ, and why: what the rewrite does not promise to keep, or holds by another measure."""

MAY_DIFFER: dict[str, str] = {}
"""Reason by pattern of case names. What such a case returns under "must" is compared all the same.

Where compressed transfers are written anew: `"compressed *": "the bits of one process and of gloo agree"`.
"""
