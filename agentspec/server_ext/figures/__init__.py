"""Count, in an engine, what drafting did.

``metrics``   counters and durations, the figures of each request, the step record
``traces``    what each step of a request drafted, and where its tokens came from, for requests that ask
``accounts``  adds each step to these
"""
