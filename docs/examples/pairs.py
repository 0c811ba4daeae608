"""Train planned packs of pairs by TRL's DPOTrainer; see docs/use-it-in/transformers.md."""

import sys

import packplan as pp
from packplan.hf import row_lengths, use_plan

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

words = ["red", "blue", "a circle"]
rows = {"prompt": words * 8, "chosen": [f"{one} " * 9 for one in words] * 8, "rejected": words * 8}
args = DPOConfig(
    "out",
    max_length=None,
    per_device_train_batch_size=2,  # packs of a rank in a step
    num_train_epochs=2,
    learning_rate=1e-3,
    save_steps=2,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
trainer = DPOTrainer(model, args=args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer)
plan = pp.plan(row_lengths(trainer), 128)
schedule = use_plan(trainer, plan)
if args.process_index == 0:
    print(plan.show(), f"{schedule.total_steps} steps", sep="\n")
trainer.train(resume_from_checkpoint="--resume" in sys.argv)
trainer.accelerator.end_training()
