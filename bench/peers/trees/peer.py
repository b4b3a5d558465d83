"""Trains one peer on one data set and prints a line of JSON. Started by run.py in a process of its own."""

import ctypes
import fcntl
import json
import multiprocessing
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from data import load


HERE = Path(__file__).resolve().parent


def usage():
    """CPU seconds and peak memory in bytes of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024])


class Measured:
    """Seconds, CPU seconds and added memory of a `with` block."""

    def __enter__(self):
        self.before, self.started = usage(), time.perf_counter()
        return self

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self.started
        self.cpu, self.memory = (usage() - self.before).tolist()


def objective(classes):
    return {"objective": "multi:softprob", "num_class": classes} if classes > 2 else {"objective": "binary:logistic"}


def train_xgboost(x, y, job):
    import xgboost as xgb

    params = {"eta": 0.1, "max_depth": 6, "max_bin": 256, "tree_method": "hist", "nthread": job["threads"], "verbosity": 0}
    params |= objective(job["classes"])
    with Measured() as cost:
        matrix = xgb.QuantileDMatrix(x, y, max_bin=256, nthread=job["threads"])
        model = xgb.train(params, matrix, job["rounds"])
    return cost, lambda x: model.predict(xgb.DMatrix(x))


def train_lightgbm(x, y, job, machines=None):
    import lightgbm as lgb

    params = {
        "learning_rate": 0.1, "max_depth": 6, "num_leaves": 64, "max_bin": 255, "num_threads": job["threads"],
        "verbose": -1, "min_data_in_leaf": 1, "min_sum_hessian_in_leaf": 1.0, "lambda_l2": 1.0,
    } | (machines or {})
    classes = job["classes"]
    params |= {"objective": "multiclass", "num_class": classes} if classes > 2 else {"objective": "binary"}
    with Measured() as cost:
        model = lgb.train(params, lgb.Dataset(x, y), job["rounds"])
    return cost, model.predict


def hessboost(job):
    """Runs the program in hessboost/, which run.py builds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "predictions"
        command = [HERE / "hessboost" / "target" / "release" / "hessboost-peer", json.dumps(job), out]
        cost = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        predictions = np.fromfile(out, np.float32)
    if job["classes"] > 2:
        predictions = predictions.reshape(-1, job["classes"])
    return cost | {"quality": quality(predictions, job), "sent": 0}


def private_network():
    """Moves this process to a network of its own, whose loopback device counts only its bytes. Needs root."""
    clone_newnet, get_flags, set_flags, up = 0x40000000, 0x8913, 0x8914, 0x1
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newnet) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        request = fcntl.ioctl(device, get_flags, struct.pack("16sh22x", b"lo", 0))
        flags = struct.unpack("16sh22x", request)[1]
        fcntl.ioctl(device, set_flags, struct.pack("16sh22x", b"lo", flags | up))
    return True


def loopback_bytes():
    for line in open("/proc/net/dev"):
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def quality(predictions, job):
    """AUC, or the error for more than two classes, of the predictions of the test rows."""
    y = np.load(Path(job["folder"]) / f"{job['name']}-test-y.npy")
    p = np.asarray(predictions)
    if job["classes"] > 2:
        return float(np.mean(np.argmax(p, axis=1) != y))
    order = np.argsort(p, kind="stable")
    ranks = np.empty(len(p))
    ranks[order] = np.arange(1, len(p) + 1)
    _, inverse, counts = np.unique(p, return_inverse=True, return_counts=True)
    ranks = (np.bincount(inverse, ranks) / counts)[inverse]
    positives = y.sum()
    return float((ranks[y == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(y) - positives)))


def test_rows(job):
    return load(Path(job["folder"]), f"{job['name']}-test")[0]


def worker(rank, job, shared, results):
    x, y = load(Path(job["folder"]), f"{job['name']}-train")
    half = len(y) // job["workers"]
    rows = slice(rank * half, len(y) if rank == job["workers"] - 1 else (rank + 1) * half)
    x, y = x[rows], y[rows]
    if job["peer"] == "xgboost":
        import xgboost as xgb

        with xgb.collective.CommunicatorContext(**shared):
            cost, predict = train_xgboost(x, y, job)
    else:
        ports = shared
        machines = {
            "tree_learner": "data", "num_machines": len(ports), "pre_partition": True,
            "machines": ",".join(f"127.0.0.1:{port}" for port in ports), "local_listen_port": ports[rank],
        }
        cost, predict = train_lightgbm(x, y, job, machines)
    results.put((cost.seconds, cost.cpu, cost.memory, quality(predict(test_rows(job)), job) if rank == 0 else None))


def main():
    job = json.loads(sys.argv[1])
    if job["peer"] == "hessboost":
        print(json.dumps(hessboost(job)))
        return
    if job["workers"] == 1:
        x, y = load(Path(job["folder"]), f"{job['name']}-train")
        train = {"xgboost": train_xgboost, "lightgbm": train_lightgbm}[job["peer"]]
        cost, predict = train(x, y, job)
        auc_or_error = quality(predict(test_rows(job)), job)
        print(json.dumps({
            "seconds": cost.seconds, "cpu": cost.cpu, "memory": cost.memory, "quality": auc_or_error, "sent": 0,
        }))
        return
    is_private = private_network()
    if job["peer"] == "xgboost":
        from xgboost.tracker import RabitTracker

        tracker = RabitTracker(host_ip="127.0.0.1", n_workers=job["workers"])
        tracker.start()
        shared = tracker.worker_args()
    else:
        sockets = [socket.socket() for _ in range(job["workers"])]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        shared = [listener.getsockname()[1] for listener in sockets]
        for listener in sockets:
            listener.close()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    before = loopback_bytes()
    workers = [context.Process(target=worker, args=(rank, job, shared, results)) for rank in range(job["workers"])]
    for process in workers:
        process.start()
    ends = [results.get() for _ in workers]
    for process in workers:
        process.join()
    # On a shared loopback device, the bytes of other programs would count, too.
    sent = (loopback_bytes() - before) / job["workers"] if is_private else float("nan")
    print(json.dumps({
        "seconds": max(end[0] for end in ends),
        "cpu": sum(end[1] for end in ends),
        "memory": sum(end[2] for end in ends),
        "quality": next(end[3] for end in ends if end[3] is not None),
        "sent": sent,
    }))


if __name__ == "__main__":
    main()
