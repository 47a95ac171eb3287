"""WebShop-v0: time of steps and searches, memory of worker processes, and what scripted players score.

    python benchmarks/environments/webshop.py [--products 100000] [--out benchmarks/results/webshop_environment.json]

Three shops: the made-up one that ships, one of `--products` made-up products read from files as the real ones are, and
an index over as many texts of 40 to 160 words that are drawn by Zipf's law. Times are CPU time of one process, so that
other work on the machine counts little.
"""

import argparse
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from rollgym.clients.measuring.revision import revision
from rollgym.envs.webshop.catalogue import open_catalogue
from rollgym.envs.webshop.environment import WebShopEnv, goal_range
from rollgym.envs.webshop.expert import instruction_query
from rollgym.envs.webshop.search import IndexWriter, SearchIndex
from rollgym.envs.webshop.sources import generate_records

KINDS = 25
VOCABULARY = 60_000


def spread(seconds):
    return {
        "median_ms": round(1e3 * statistics.median(seconds), 4),
        "p95_ms": round(1e3 * float(np.percentile(seconds, 95)), 4),
        "count": len(seconds),
    }


def timed(call, *arguments):
    started = time.process_time()
    result = call(*arguments)
    return result, time.process_time() - started


def steps(kwargs, episodes=300):
    """Play listed actions at random; steps that search apart from those that do not."""
    table = {}
    for profile in ("native", "compact"):
        environment = WebShopEnv(profile=profile, **kwargs)
        draw = np.random.default_rng(0)
        searches, others, resets = [], [], []
        for seed in range(episodes):
            (_, info), spent = timed(partial(environment.reset, seed=seed))
            resets.append(spent)
            over = False
            while not over:
                action = info["available_actions"][int(draw.integers(len(info["available_actions"])))]
                (_, _, terminated, truncated, info), spent = timed(environment.step, action)
                (searches if action[0] == "s" else others).append(spent)
                over = terminated or truncated
        table[profile] = {
            "reset": spread(resets),
            "step_without_search": spread(others),
            "step_with_search": spread(searches),
        }
    return table


def catalogue_searches(catalogue, count=1000):
    goals = catalogue.goals("human")
    environment = WebShopEnv()
    times = []
    for index in range(min(count, len(goals))):
        shop = environment._visit(0)
        shop.goal = goals[index]
        query = instruction_query(shop)
        times.append(timed(catalogue.index.search, query, 50)[1])
    return spread(times)


def drawn_texts(documents, folder):
    """Texts whose words follow Zipf's law, and queries of 3 to 9 such words."""
    draw = np.random.default_rng(0)
    chances = 1 / np.arange(1, VOCABULARY + 1)
    below = np.cumsum(chances / chances.sum())
    words = np.asarray([f"w{number}" for number in range(VOCABULARY)])

    def text(length):
        return " ".join(words[np.searchsorted(below, draw.random(length))])

    writer = IndexWriter()
    texts = [text(int(draw.integers(40, 161))) for _ in range(documents)]
    started = time.process_time()
    for each in texts:
        writer.add(each)
    writer.write(folder)
    built = time.process_time() - started
    index = SearchIndex(folder, documents)
    times = [timed(index.search, text(int(draw.integers(3, 10))), 50)[1] for _ in range(500)]
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"build_s": round(built, 1), "size_mb": round(size / 1e6, 1), "search": spread(times)}


def write_files(folder, products):
    made = generate_records(per_kind=products // KINDS)
    (folder / "items_shuffle.json").write_text(json.dumps(list(made.products)))
    (folder / "items_ins_v2.json").write_text(json.dumps(made.attributes))
    (folder / "items_human_ins.json").write_text(json.dumps(made.human_instructions))


def mapped_memory(folder):
    """Resident and proportional memory of this process that is a file of `folder`, and all of its own, in MB."""
    totals = {"catalogue_rss": 0, "catalogue_pss": 0, "catalogue_private": 0, "process_pss": 0}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split()[0] and not value.strip().endswith("kB"):
            ours = str(folder) in line
        elif name == "Pss":
            totals["process_pss"] += int(value.split()[0])
            totals["catalogue_pss"] += int(value.split()[0]) if ours else 0
        elif name == "Rss" and ours:
            totals["catalogue_rss"] += int(value.split()[0])
        elif name in ("Private_Clean", "Private_Dirty") and ours:
            totals["catalogue_private"] += int(value.split()[0])
    return {name: round(kilobytes / 1024, 1) for name, kilobytes in totals.items()}


def worker(data_dir, cache_dir, ready, measure, answers):
    """Open a catalogue, look at every product and every posting, and say what that takes in memory."""
    catalogue = open_catalogue(data_dir, None, cache_dir)
    for number in range(len(catalogue)):
        catalogue.product(number)
        catalogue.price(number)
    for goal in [catalogue.goals("human")[index] for index in range(0, len(catalogue.goals("human")), 97)]:
        catalogue.index.search(goal.instruction, 50)
    int(catalogue.index._documents.sum(dtype=np.int64)), float(catalogue.index._scores.sum())
    ready.wait()
    answers.put(mapped_memory(cache_dir))
    measure.wait()


def shared_memory(data_dir, cache_dir, processes):
    spawn = multiprocessing.get_context("spawn")
    ready, measure, answers = spawn.Barrier(processes), spawn.Barrier(processes), spawn.Queue()
    started = [
        spawn.Process(target=worker, args=(data_dir, cache_dir, ready, measure, answers))
        for _ in range(processes)
    ]
    for process in started:
        process.start()
    told = [answers.get() for _ in started]
    for process in started:
        process.join()
    return {
        "processes": processes,
        "catalogue_rss_mb_each": statistics.mean(each["catalogue_rss"] for each in told),
        "catalogue_pss_mb_all": round(sum(each["catalogue_pss"] for each in told), 1),
        "process_pss_mb_each": round(statistics.mean(each["process_pss"] for each in told), 1),
    }


def scripted(split, goals, chooses):
    """Search for what the customer says, open the first result, choose the values that were named, or none, and buy."""
    environment = WebShopEnv(goals=goals, split=split)
    among = goal_range(len(environment._goals), split)
    perfect, total = 0, 0.0
    for index in among:
        observation, info = environment.reset(seed=0, options={"goal_index": index})
        *_, info = environment.step(info["available_actions"][0])
        *_, info = environment.step(info["available_actions"][2])
        listed = info["available_actions"]
        for action in listed[listed.index("click[buy now]") + 1 :]:
            named = re.search(rf"\b{re.escape(action[6:-1])}\b", observation)
            if chooses and named:
                environment.step(action)
        *_, info = environment.step("click[buy now]")
        perfect += info["success"]
        total += info["env_reward"]
    return {"goals": len(among), "success": perfect / len(among), "mean_reward": total / len(among)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--products", type=int, default=100_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "command": f"python benchmarks/environments/webshop.py --products {options.products}",
        "commit": revision(),
        "cores": os.cpu_count(),
        "first_result": {goals: scripted("test", goals, False) for goals in ("human", "synthetic")},
        "first_result_with_named_options": {
            goals: scripted("test", goals, True) for goals in ("human", "synthetic")
        },
        "made_up_shop": {"steps": steps({}), "search": catalogue_searches(open_catalogue())},
    }
    with tempfile.TemporaryDirectory() as name:
        data, cache, texts = (Path(name) / part for part in ("data", "cache", "texts"))
        for folder in (data, texts):
            folder.mkdir()
        write_files(data, options.products)
        kwargs = {"data_dir": str(data), "cache_dir": str(cache)}
        catalogue, built = timed(lambda: open_catalogue(str(data), None, str(cache)))
        size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        result["from_files"] = {
            "products": len(catalogue),
            "goals": {kind: len(catalogue.goals(kind)) for kind in ("human", "synthetic")},
            "build_s": round(built, 1),
            "size_mb": round(size / 1e6, 1),
            "steps": steps(kwargs),
            "search": catalogue_searches(catalogue),
            "memory": [shared_memory(str(data), str(cache), count) for count in options.processes],
        }
        result["drawn_texts"] = {"documents": options.products, **drawn_texts(options.products, texts)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
