"""The ResNets and CIFAR-10 in the layouts that users have."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.errors import DataError, WorkloadError
from halfstep.lab.workloads.cifar_resnet import CifarResNet, augment, normalize, read_images


def pixels(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


@pytest.fixture
def torchvision_folder(tmp_path):
    """Twelve images in the six pickles that torchvision unpacks."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for i, name in enumerate(names):
        content = {b"data": pixels(2, i).reshape(2, 3072), b"labels": [i, i + 1], b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder


@pytest.fixture
def npz(tmp_path):
    """The same twelve images as an .npz file."""
    path = tmp_path / "packed" / "cifar.npz"
    path.parent.mkdir()
    arrays = {
        "x_train": np.concatenate([pixels(2, i) for i in range(5)]).transpose(0, 2, 3, 1),
        "y_train": np.array([label for i in range(5) for label in (i, i + 1)], dtype=np.uint8),
        "x_test": pixels(2, 5).transpose(0, 2, 3, 1),
        "y_test": np.array([5, 6], dtype=np.uint8),
    }
    np.savez(path, **arrays)
    return path


def test_both_layouts_give_the_same_images(torchvision_folder, npz):
    places = [torchvision_folder, torchvision_folder.parent, npz, npz.parent]
    first, *others = [read_images(place) for place in places]
    assert first.x_train.shape == (10, 3, 32, 32)
    assert first.x_train.dtype == torch.uint8
    assert np.array_equal(first.x_train[2].numpy(), pixels(2, 1)[0])
    assert first.y_train.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert first.y_test.tolist() == [5, 6]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_data_folder_may_hold_cifar10_beside_others(npz, tmp_path):
    npz.parent.rename(tmp_path / "cifar10")
    assert len(read_images(tmp_path).x_test) == 2


@pytest.mark.parametrize("place", [None, "nowhere"])
def test_missing_data_is_an_error_that_says_how_to_get_it(tmp_path, place):
    with pytest.raises(DataError, match=r"torchvision\.datasets\.CIFAR10\('data', download=True\)"):
        read_images(place and tmp_path / place)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"holds neither cifar-10-batches-py nor an \.npz file"):
        read_images(tmp_path)


def test_a_missing_part_is_named(torchvision_folder):
    (torchvision_folder / "data_batch_3").unlink()
    with pytest.raises(DataError, match="lacks data_batch_3;"):
        read_images(torchvision_folder)


def test_a_missing_array_is_named(tmp_path):
    np.savez(tmp_path / "cifar.npz", x_train=np.zeros(1))
    with pytest.raises(DataError, match="lacks y_train, x_test, y_test;"):
        read_images(tmp_path)


def broken(npz, **arrays):
    with np.load(npz) as packed:
        np.savez(npz, **{**packed, **arrays})


@pytest.mark.parametrize("cut", ["junk", "truncated", "empty", "damaged", "one array"])
def test_a_file_that_is_no_whole_npz_is_named(npz, cut):
    whole = npz.read_bytes()
    flipped = bytearray(whole)
    flipped[300] ^= 255
    (npz.parent / "one.npy").write_bytes(b"")
    np.save(npz.parent / "one.npy", np.zeros(3))
    content = {
        "junk": b"junk", "truncated": whole[: len(whole) // 2], "empty": b"", "damaged": bytes(flipped),
        "one array": (npz.parent / "one.npy").read_bytes(),
    }  # fmt: skip
    npz.write_bytes(content[cut])
    with pytest.raises(DataError, match=r"cifar\.npz is not a complete \.npz file \(.*pass a folder"):
        read_images(npz)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x_test": np.zeros((2, 3, 32, 32), np.uint8)},
            r"cifar\.npz: test pixels must be uint8 of N x 32 x 32 x 3, got uint8 of 2 x 3 x 32 x 32",
        ),
        ({"x_train": np.zeros((10, 32, 32, 3))}, "train pixels must be uint8 of .*, got float64 of 10 x 32"),
        ({"x_test": np.zeros((0, 32, 32, 3), np.uint8)}, "the test split holds no images"),
        (
            {"y_test": np.zeros(3, np.int64)},
            "test labels must be one integer for each of 2 images, got int64 of 3",
        ),
        ({"y_test": np.zeros(2)}, "test labels must be one integer for each of 2 images, got float64 of 2"),
        ({"y_train": np.full(10, 10)}, "train labels must be from 0 to 9, got 10 to 10"),
        ({"y_train": np.full(10, -1)}, "train labels must be from 0 to 9, got -1 to -1"),
        ({"y_train": np.array([None] * 10)}, r"cifar\.npz is not a complete \.npz file \(Object arrays"),
    ],
)
def test_arrays_that_are_no_images_are_an_error_that_says_what_came(npz, arrays, message):
    broken(npz, **arrays)
    with pytest.raises(DataError, match=message):
        read_images(npz)


def test_labels_may_be_a_column(npz):
    broken(npz, y_test=np.array([[5], [9]]))
    assert read_images(npz).y_test.tolist() == [5, 9]


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return (self.function, ())


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({b"data": Calls(print)}),
        pickle.dumps({b"data": Calls(np.show_config)}),
        b"",
        b"nonsense",
        pickle.dumps({b"data": 1}),
    ],
)
def test_a_pickle_that_is_no_batch_is_refused_and_runs_nothing(torchvision_folder, content, capsys):
    (torchvision_folder / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match="test_batch is not a CIFAR-10 batch"):
        read_images(torchvision_folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("depth", "count"), [(18, 11_173_962), (50, 23_520_842), (101, 42_512_970)])
def test_at_width_64_the_networks_have_their_known_sizes(depth, count):
    with torch.device("meta"):
        model = CifarResNet(depth=depth, width=64).build(0)
    assert sum(p.numel() for p in model.parameters()) == count


def test_a_depth_that_is_none_is_refused():
    with pytest.raises(WorkloadError, match="depth=34 is unknown; choose one of 18, 50, 101"):
        CifarResNet(depth=34)


def test_the_stages_halve_the_image_three_times():
    model = CifarResNet(width=4).build(0)
    assert model.stages(model.stem(torch.zeros(1, 3, 32, 32))).shape == (1, 32, 4, 4)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_normalize_has_the_mean_and_deviation_of_cifar():
    image = torch.tensor([0, 255], dtype=torch.uint8).repeat(3, 1)[None, :, None]
    expected = [
        [(0 - m) / s, (1 - m) / s] for m, s in zip((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), strict=True)
    ]
    assert torch.allclose(normalize(image)[0, :, 0], torch.tensor(expected))


def test_augment_crops_and_flips_as_a_slow_loop_does():
    images = torch.from_numpy(pixels(16, 0))
    got = augment(images, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    top, left = torch.randint(9, (2, 16), generator=generator).tolist()
    flip = (torch.rand(16, generator=generator) < 0.5).tolist()
    assert len(set(flip)) == 2
    for i in range(16):
        crop = F.pad(normalize(images[i : i + 1]), (4, 4, 4, 4))[0, :, top[i] : top[i] + 32, left[i] : left[i] + 32]
        assert torch.equal(got[i], crop.flip(2) if flip[i] else crop)


def test_a_seed_repeats_its_batches_and_another_differs(npz):
    job = CifarResNet(data=npz, batch=4)
    (x, y), (again, labels), (other, _) = (next(job.batches(seed)) for seed in (0, 0, 1))
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert not torch.equal(x, other)


def test_evaluation_takes_the_first_test_images_unchanged(npz):
    ((x, y),) = CifarResNet(data=npz, eval_images=1).validation()
    assert torch.equal(x, normalize(read_images(npz).x_test[:1]))
    assert y.tolist() == [5]


def test_accuracy_counts_the_largest_logit():
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert CifarResNet().correct(logits, torch.tensor([1, 0, 0, 1])).item() == 0.75


def test_the_real_images_are_read(data_dir):
    images = read_images(data_dir)
    assert images.x_train.shape[1:] == (3, 32, 32)
    assert set(images.y_test.tolist()) == set(range(10))
    x, _ = next(CifarResNet(data=data_dir, batch=256).batches(0))
    assert x.mean().abs() < 0.3
    assert 0.7 < x.std() < 1.2


def test_convolutions_are_initialised_for_relu():
    convolution = CifarResNet(width=64).build(0).stages[0].body[0]
    assert isinstance(convolution, nn.Conv2d)
    assert convolution.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
