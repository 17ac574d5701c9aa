"""All benchmarks, one after the other."""

from bench import clients, consume, held_snapshot, latency, publish, queue_background, queue_held, queues
from bench._main import run
from bench._options import parse

if __name__ == "__main__":
    streams = (publish.run, consume.run, latency.run, held_snapshot.run)
    of_queues = (queues.run, queue_background.run, queue_held.run)
    run((*streams, *of_queues, clients.run), parse(__doc__ or ""))
