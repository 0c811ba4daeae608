"""
Command lines of ms-swift's examples, by their path in its repository (modelscope/ms-swift).

The arguments are those of the examples, Megatron's some of them; line breaks are ours.
"""

from __future__ import annotations

from types import MappingProxyType

_STEPS = "--eval_steps 100 --save_steps 100 --save_total_limit 2 --logging_steps 5"

_NAMED = "--model_author swift --model_name swift-robot"

_LORA = "--lora_rank 8 --lora_alpha 32"

_ONE = "--num_train_epochs 1 --per_device_train_batch_size 1"

COMMANDS = MappingProxyType(
    {
        "examples/train/full/train.sh": f"""# 76GiB
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2-7B-Instruct \\
    --train_type full \\
    --dataset swift/self-cognition#1000 \\
    {_ONE} --learning_rate 1e-5 --gradient_accumulation_steps 16 \\
    {_STEPS} \\
    {_NAMED}
""",
        "examples/train/tuners/lora/train.sh": f"""# 17.2GiB
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset swift/self-cognition#1000 \\
    {_ONE} --learning_rate 1e-4 {_LORA} --gradient_accumulation_steps 16 {_STEPS} {_NAMED}
""",
        "examples/train/tuners/dora/train.sh": f"""# 17.2GiB
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct --train_type lora --use_dora true --dataset swift/self-cognition#1000 \\
    {_ONE} --learning_rate 1e-4 {_LORA} --gradient_accumulation_steps 16 {_STEPS} {_NAMED}
""",
        "examples/train/tuners/qlora/train.sh": f"""CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2-7B-Instruct --train_type lora --dataset swift/self-cognition#1000 \\
    {_ONE} --learning_rate 1e-4 {_LORA} --gradient_accumulation_steps 16 {_STEPS} {_NAMED} \\
    --quant_bits 4 --quant_method bnb
""",
        "examples/train/packing/llm.sh": f"""# 22GB
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --train_type lora \\
    --packing true \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' \\
              'AI-ModelScope/alpaca-gpt4-data-en#500' \\
              'swift/self-cognition#500' \\
    --split_dataset_ratio 0.01 --torch_dtype bfloat16 --num_train_epochs 3 --attn_impl flash_attn \\
    --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --learning_rate 1e-4 {_LORA} \\
    --target_modules all-linear --gradient_accumulation_steps 4 --eval_steps 50 --save_steps 50 \\
    --save_total_limit 2 --logging_steps 5 --max_length 2048 --output_dir output \\
    --system 'You are a helpful assistant.' \\
    --warmup_ratio 0.05 --dataloader_num_workers 4 --dataset_num_proc 4 {_NAMED}
""",
        "examples/train/multi-gpu/ddp/train.sh": f"""# 27.5GiB * 2
nproc_per_node=2

CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct --train_type lora --torch_dtype bfloat16 \\
    --dataset 'swift/self-cognition#1000' {_ONE} {_LORA} --learning_rate 1e-4 \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    {_STEPS} --gradient_checkpointing_kwargs '{{"use_reentrant": false}}' {_NAMED}
""",
        "examples/train/packing/qwen2_5_vl.sh": f"""# 4 * 36GB
# Multimodal packing currently only supports qwen2_vl and qwen2_5_vl.
NPROC_PER_NODE=4 \\
MAX_PIXELS=1003520 \\
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
swift sft \\
    --model Qwen/Qwen2.5-VL-7B-Instruct --train_type lora --dataset 'AI-ModelScope/LaTeX_OCR#20000' \\
    --torch_dtype bfloat16 --attn_impl flash_attn --packing true --num_train_epochs 3 \\
    --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --learning_rate 3e-4 {_LORA} \\
    --target_modules all-linear --gradient_accumulation_steps 1 --eval_steps 100 --save_steps 100 \\
    --save_total_limit 5 --logging_steps 5 --max_length 8192 --output_dir output --warmup_ratio 0.05 \\
    --dataloader_num_workers 4 --dataset_num_proc 8 --deepspeed zero2
""",
        "examples/train/multimodal/ocr.sh": f"""# 2*75GB
CUDA_VISIBLE_DEVICES=0,1 \\
MAX_PIXELS=1003520 \\
swift sft \\
    --model Qwen/QVQ-72B-Preview --dataset 'AI-ModelScope/LaTeX_OCR:human_handwrite#20000' \\
    --train_type lora --torch_dtype bfloat16 {_ONE} --per_device_eval_batch_size 1 \\
    --learning_rate 1e-4 {_LORA} --target_modules all-linear --freeze_vit true \\
    --gradient_accumulation_steps 16 --eval_steps 50 --save_steps 50 --save_total_limit 5 \\
    --logging_steps 5 --max_length 2048 --output_dir output --warmup_ratio 0.05 --dataloader_num_workers 4
""",
        "examples/train/agent/qwen2_5.sh": """# 35GiB
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2.5-3B --train_type full --dataset AI-ModelScope/function-calling-chatml \\
    --split_dataset_ratio 0.01 --agent_template hermes --torch_dtype bfloat16 --num_train_epochs 2 \\
    --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --learning_rate 1e-5 \\
    --gradient_accumulation_steps 8 --eval_steps 100 --save_steps 100 --save_total_limit 2 \\
    --logging_steps 5 --max_length 8192 --save_only_model true --packing true --use_liger_kernel true \\
    --output_dir output --warmup_ratio 0.05 --attn_impl flash_attn --dataloader_num_workers 4 \\
    --dataset_num_proc 16
""",
        "examples/train/agent/loss_scale/train.sh": f"""# 20GB
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2.5-3B --train_type lora --dataset AI-ModelScope/function-calling-chatml#10000 \\
    --split_dataset_ratio 0.01 --loss_scale hermes --agent_template hermes --torch_dtype bfloat16 \\
    --num_train_epochs 2 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 \\
    --learning_rate 1e-4 {_LORA} --target_modules all-linear --modules_to_save embed_tokens lm_head \\
    --gradient_accumulation_steps 16 {_STEPS} --max_length 2048 --use_liger_kernel true \\
    --output_dir output --warmup_ratio 0.05 --dataloader_num_workers 4 --dataset_num_proc 16
""",
        "examples/train/streaming/streaming.sh": f"""CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset 'swift/self-cognition#1000' \\
    --streaming true --max_steps 1000 --learning_rate 1e-4 {_LORA} --gradient_accumulation_steps 16 \\
    {_STEPS} {_NAMED}
""",
        "examples/train/full/dft.sh": """# 4*80G
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
NPROC_PER_NODE=4 \\
swift sft \\
    --model Qwen/Qwen2.5-Math-1.5B --train_type full --dataset AI-MO/NuminaMath-CoT#100000 \\
    --torch_dtype bfloat16 --enable_dft_loss true --num_train_epochs 1 --per_device_train_batch_size 8 \\
    --learning_rate 5e-5 --gradient_accumulation_steps 32 --save_total_limit 2 --logging_steps 5 \\
    --max_length 2048 --output_dir output --system 'You are a helpful assistant.' --warmup_ratio 0.1 \\
    --deepspeed zero2 --dataloader_num_workers 4
""",
        "examples/megatron/sft.sh": f"""# 2 * 80GiB
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \\
NPROC_PER_NODE=2 \\
CUDA_VISIBLE_DEVICES=0,1 \\
megatron sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' 'swift/self-cognition#500' \\
    --tensor_model_parallel_size 2 --micro_batch_size 16 --global_batch_size 16 --lr 1e-5 {_NAMED}
""",
    }
)
"""Path of an example -> its script."""

YAML = MappingProxyType(
    {
        "examples/yaml/deepspeed/sft.yaml": """model: Qwen/Qwen2.5-7B-Instruct
torch_dtype: bfloat16
tuner_type: lora
lora_rank: 8
lora_alpha: 32
target_modules: all-linear
dataset:
  - 'AI-ModelScope/alpaca-gpt4-data-zh#500'
  - 'AI-ModelScope/alpaca-gpt4-data-en#500'
  - 'swift/self-cognition#500'
split_dataset_ratio: 0.0
max_length: 2048
system: 'You are a helpful assistant.'
model_author: swift
model_name: swift-bot
num_train_epochs: 1
per_device_train_batch_size: 1
per_device_eval_batch_size: 1
learning_rate: 1e-4
gradient_accumulation_steps: 8
eval_steps: 50
save_steps: 50
save_total_limit: 2
logging_steps: 5
output_dir: output
warmup_ratio: 0.05
dataloader_num_workers: 4
dataset_num_proc: 4
deepspeed: zero2
"""
    }
)
"""Path of an example -> its configuration."""
