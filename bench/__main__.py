"""All benchmarks, one after the other."""

from bench import consume, held_snapshot, latency, publish
from bench._main import run
from bench._options import parse

if __name__ == "__main__":
    run((publish.run, consume.run, latency.run, held_snapshot.run), parse(__doc__ or ""))
