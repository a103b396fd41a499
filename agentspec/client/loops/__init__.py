"""Run an agent's loops: refine an answer, take the best of several, call tools, pass work through stages."""
