"""Train planned packs with TRL's SFTTrainer; see docs/use-it-in/transformers.md."""

import sys

import packplan as pp
from packplan.hf import use_plan

import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
rows = load_from_disk(sys.argv[2])
plan = pp.plan([len(ids) for ids in rows["input_ids"]], 256)
args = SFTConfig(
    "out",
    max_length=None,
    dataset_kwargs={"skip_prepare_dataset": True},
    per_device_train_batch_size=2,
    num_train_epochs=2,
    learning_rate=1e-3,
    save_steps=3,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
schedule = use_plan(trainer, plan)
if args.process_index == 0:
    print(plan.show(), f"{schedule.total_steps} steps", sep="\n")
trainer.train(resume_from_checkpoint="--resume" in sys.argv)
trainer.accelerator.end_training()
