"""Count, in an engine, what drafting did.

``metrics``         counters and durations, and the figures of each request
``response_count``  the steps and tokens of a response that figures count, up to its end
``traces``          what each step of a request drafted, and where its tokens came from, for requests that ask
``step_record``     the file with a line for each request and step (setting ``record``)
``accounts``        adds each step to these
"""
