"""Deterministic load balancing and sequence packing in pure Python: costs in, plans out."""
