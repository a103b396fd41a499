"""``python -m agentspec.cli``: the same as the ``agentspec`` program."""

from agentspec.cli.app import main

if __name__ == "__main__":
    main()
