"""Packages out of sight of a process, as where their extra is not installed."""

# As `sitecustomize.py` on PYTHONPATH, also of child processes: the packages of DETRT_BLOCKED, a JSON list, cannot be imported.
BLOCKER = """
import json, os, sys
names = set(json.loads(os.environ["DETRT_BLOCKED"]))
class Filter:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in names else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Filter(finder) for finder in sys.meta_path]
"""
