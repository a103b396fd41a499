"""Extend vLLM's engine core and its workers.

``runner``          drafts, from an object on vLLM's model runner
``engine_builder``  builds the drafting engine of the served model
``step_reader``     reads the runner's batch after a step into a ``Step``
``draft_models``    runs speculators beside the suffix index, on all tensor-parallel ranks
``native_drafters`` runs the drafters of vLLM's own methods
``skipped_passes``  lets these drafters leave out forward passes, and make up for them later
``cheap_steps``     keeps a step from costing as much as if every row drafted ``num_speculative_tokens`` tokens
``grammar_bitmask`` keeps the bitmask of structured output small in the same way
``cuda_graphs``     chooses CUDA graphs for rows with drafts of different lengths, or none
``sampling_faults`` corrects sampling that drafts would change
``streamed_input``  lets streamed input follow a response as without drafts
``cpu``             makes verification cheaper on CPUs
"""
