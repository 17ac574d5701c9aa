"""Positions and windows: what readers outside the database rest on."""
