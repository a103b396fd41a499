"""Run the demo: an agent that writes functions, tests them and asks for corrections, with and without agentspec."""
