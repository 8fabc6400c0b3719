"""A job of Hugging Face Trainer: job_places.py says what it is for."""

import torch
from job_places import ACCUMULATE, BATCH, EPOCHS, FOLDER, WORKERS, data, leave, trains, wait_at
from job_places import training_data as samples_for
from transformers import TrainerCallback, TrainingArguments

import elastic
from elastic.integrations.transformers import ElasticTrainer

run = elastic.join(checkpoints=FOLDER / "checkpoints", when=5)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}


class Record(TrainerCallback):
    """All evaluations are in the log, which is the job's."""

    def on_save(self, args, state, control, **others):
        wait(self.trainer, "save")


class Trainer(ElasticTrainer):
    batches = 0

    def training_step(self, *args, **others):
        trains(epoch=int(self.state.epoch or 0))
        self.batches += 1
        if self.batches % (STEP_OF_WAIT * ACCUMULATE) == 0:
            wait(self, "train")
        return super().training_step(*args, **others)

    def prediction_step(self, *args, **others):
        wait(self, "validation")
        return super().prediction_step(*args, **others)


STEP_OF_WAIT = 4  # of an epoch, on each rank


def wait(trainer, place):
    # At the end of an epoch, Trainer's epoch is the next one.
    epoch = trainer.state.epoch or 0
    rank = trainer.args.process_index
    wait_at(place, epoch=int(epoch) - (place != "train" and epoch > 1.5), rank=rank)


def rows(samples):
    return [{"x": x, "labels": y} for x, y in samples]


net = Net()
record = Record()
trainer = record.trainer = Trainer(
    model=net,
    args=TrainingArguments(
        output_dir=str(FOLDER / "saved"),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_num_workers=WORKERS,
        dataloader_pin_memory=False,
        num_train_epochs=EPOCHS,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=None,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    ),
    train_dataset=rows(samples_for(run.largest_world)),
    eval_dataset=rows(data(20)),
    callbacks=[record],
)
trainer.train()
evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
leave(net, steps=trainer.state.global_step, validations=evaluated)
