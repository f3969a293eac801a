"""The EAGLE-3 drafter: built, warm-started, trained by speculators in a process of its own, exported."""
