#!/usr/bin/env bash
# GRPO with verl on GSM8K, whose vLLM engines draft with agentspec: by configuration alone.
#
# Not run: it needs GPUs. The option names are those of verl's main branch of January 2026 (0.8.0.dev); its pinned vLLM is
# older than the 0.28 that agentspec needs, so install vLLM yourself:
#   pip install verl "PATH/TO/CHECKOUT[server]"
# Data as for verl's own examples: python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#
# The last lines are what agentspec needs. verl makes its engines in Ray actors, so the switch goes to Ray's workers:
#   AGENTSPEC           every vLLM engine drafts
#   AGENTSPEC_STORE     all engines on one store draft from each other's samples
#   AGENTSPEC_TENANT    whose rollouts these are, where several share the store
#   AGENTSPEC_SETTINGS  other settings, here a window: what older weights wrote fades
# calculate_log_probs returns the engine's log probabilities, which show that drafting does not change them.
set -euo pipefail

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=128 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  trainer.n_gpus_per_node=2 \
  trainer.nnodes=1 \
  trainer.total_epochs=5 \
  trainer.logger='["console"]' \
  +ray_kwargs.ray_init.runtime_env.env_vars.AGENTSPEC='"1"' \
  +ray_kwargs.ray_init.runtime_env.env_vars.AGENTSPEC_STORE='"redis://localhost:6379/0"' \
  +ray_kwargs.ray_init.runtime_env.env_vars.AGENTSPEC_TENANT='"gsm8k"' \
  +ray_kwargs.ray_init.runtime_env.env_vars.AGENTSPEC_SETTINGS="'{\"history_window\": \"8 weights\"}'" \
  "$@"
