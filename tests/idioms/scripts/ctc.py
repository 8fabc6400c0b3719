"""Speech recognition with CTC: sequences of different lengths

`collate_fn` pads each rank's batch to its own longest sequence. `CTCLoss` divides each sequence's
loss by its length, and takes the mean over sequences, so batches of different shapes are weighted
by their samples.

Group: Data
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
lengths = torch.randint(8, 20, (48,)).tolist()
utterances = [(torch.randn(n, 5), torch.randint(1, 6, (n // 4,))) for n in lengths]


def data_processing(batch):
    spectrograms = pad_sequence([s for s, _ in batch], batch_first=True)
    labels = pad_sequence([t for _, t in batch], batch_first=True)
    input_lengths = torch.tensor([len(s) for s, _ in batch])
    label_lengths = torch.tensor([len(t) for _, t in batch])
    return spectrograms, labels, input_lengths, label_lengths


class SpeechRecognitionModel(nn.Module):
    def __init__(self, n_feats=5, rnn_dim=8, n_class=6):
        super().__init__()
        self.cnn = nn.Conv1d(n_feats, rnn_dim, 3, padding=1)
        self.norm = nn.LayerNorm(rnn_dim)
        self.rnn = nn.GRU(rnn_dim, rnn_dim, batch_first=True)
        self.classifier = nn.Linear(rnn_dim, n_class)

    def forward(self, x, lengths):
        x = self.norm(self.cnn(x.transpose(1, 2)).transpose(1, 2)).relu()
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        x, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.classifier(x)


hparams = {"learning_rate": 5e-3, "epochs": 3, "batch_size": 4}
run = elastic.join()
model = run.wrap(SpeechRecognitionModel())
train_loader = run.loader(
    DataLoader(
        utterances, batch_size=hparams["batch_size"], shuffle=True, collate_fn=data_processing
    ),
    global_batch=12,
)
optimizer = torch.optim.AdamW(model.parameters(), hparams["learning_rate"])
criterion = nn.CTCLoss(blank=0)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer,
    max_lr=hparams["learning_rate"],
    steps_per_epoch=len(train_loader),
    epochs=hparams["epochs"],
)
run.track(optimizer=optimizer, scheduler=scheduler)


def train():
    for epoch in run.epochs(hparams["epochs"]):
        model.train()
        for spectrograms, labels, input_lengths, label_lengths in train_loader:
            optimizer.zero_grad()
            output = model(spectrograms, input_lengths).log_softmax(dim=2).transpose(0, 1)
            loss = criterion(output, labels, input_lengths, label_lengths)
            loss.backward()
            optimizer.step()
            scheduler.step()


run.retry(train)
result = model.state_dict()
