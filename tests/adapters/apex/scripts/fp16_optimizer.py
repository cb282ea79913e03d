"""The style before amp.initialize: network_to_half and FP16_Optimizer, which scales, unscales, clips and skips."""

import argparse

import torch
from apex.fp16_utils import FP16_Optimizer, network_to_half
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--fp32", dest="fp16", action="store_false")
parser.add_argument("--opt-level", help="not used")
parser.add_argument("--static-loss-scale", type=float, default=1)
parser.add_argument("--dynamic-loss-scale", action="store_true", default=True)


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    if args.fp16:
        model = network_to_half(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if args.fp16:
        optimizer = FP16_Optimizer(
            optimizer,
            static_loss_scale=args.static_loss_scale,
            dynamic_loss_scale=args.dynamic_loss_scale,
            dynamic_loss_args={"init_scale": 2**7},
        )
    x = torch.randn(32, 6)
    y, losses = x[:, :1] + x[:, 1:2], []
    for _ in range(10):
        loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        if args.fp16:
            optimizer.backward(loss, update_master_grads=False)
            optimizer.update_master_grads()
            optimizer.clip_master_grads(5.0)
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    state = optimizer.state_dict()
    weights = state["fp32_from_fp16"] if args.fp16 else model.state_dict()
    torch.save({"losses": losses, "weights": weights, "optimizer": state}, args.out)


main()
