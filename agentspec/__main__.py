"""Run the ``agentspec`` program as ``python -m agentspec``."""

from agentspec.cli.app import main

if __name__ == "__main__":
    main()
