"""Train planned packs of texts and images with transformers; see docs/use-it-in/transformers.md."""

import json
import sys

import packplan as pp
from packplan.hf import use_plan

import torch
from PIL import Image
from torch.utils.data import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments


class Rows(Dataset):
    """Data set of records with a text and an image, encoded by the processor."""

    def __init__(self, path, processor):
        self.processor = processor
        with open(path) as lines:
            self.records = [json.loads(line) for line in lines]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        record = self.records[index]
        return self.processor(text=record["text"], images=Image.open(record["image"]), return_tensors="pt")


model = AutoModelForImageTextToText.from_pretrained(sys.argv[1])
rows = Rows(sys.argv[2], AutoProcessor.from_pretrained(sys.argv[1]))
plan = pp.plan([row["input_ids"].numel() for row in rows], 512)
args = TrainingArguments("out", learning_rate=1e-3, logging_steps=1, use_cpu=not torch.cuda.is_available())
trainer = Trainer(model, args, train_dataset=rows)
schedule = use_plan(trainer, plan)
trainer.train()
assert trainer.state.global_step == schedule.total_steps
