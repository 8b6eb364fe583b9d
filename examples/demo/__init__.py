"""The main job at a glance: every example task, attempted by a group of agents in sandbox slots, scored, shown."""
