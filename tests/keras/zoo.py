"""Ten small models, made as those of keras.applications and of the guides of Keras: one of each architecture."""

from tests.keras.common import keras

layers = keras.layers
INITIAL = {"recurrent_initializer": "glorot_uniform"}  # torch has no low kernel for that of Keras


def conv(x, filters, size=3, strides=1, name=None):
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False, name=name)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def classifier(inputs, x, classes=5):
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, activation="softmax", name="head")(x))


def vgg():
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(4, 3, activation="relu", name="stem"),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(5, activation="softmax", name="head"),
        ]
    )


def resnet():
    inputs = keras.Input((16, 16, 3))
    x = conv(inputs, 4, name="stem")
    for _ in range(2):
        y = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(conv(x, 4)))
        x = layers.Activation("relu")(layers.Add()([x, y]))
    return classifier(inputs, x)


def mobilenet():
    inputs = keras.Input((16, 16, 3))
    x = conv(inputs, 4, strides=2, name="stem")
    x = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
    return classifier(inputs, layers.SeparableConv2D(8, 3)(x))


def densenet():
    inputs = keras.Input((16, 16, 3))
    x = conv(inputs, 4, name="stem")
    for _ in range(2):
        x = layers.Concatenate()([x, conv(x, 4)])
    return classifier(inputs, layers.AveragePooling2D(2)(x))


def inception():
    inputs = keras.Input((16, 16, 3))
    x = conv(inputs, 4, name="stem")
    branches = [conv(x, 2, 1), conv(conv(x, 2, 1), 2, 3), layers.MaxPooling2D(3, 1, padding="same")(x)]
    return classifier(inputs, layers.Concatenate()(branches))


def efficientnet():
    inputs = keras.Input((16, 16, 3))
    x = conv(inputs, 4, name="stem")
    squeezed = layers.Reshape((1, 1, 4))(layers.GlobalAveragePooling2D()(x))
    gate = layers.Conv2D(4, 1, activation="sigmoid")(layers.Conv2D(1, 1, activation="silu")(squeezed))
    return classifier(inputs, layers.Multiply()([x, gate]))


def convnext():
    inputs = keras.Input((16, 16, 3))
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Conv2D(4, 4, 4, name="stem")(inputs))
    y = layers.LayerNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
    y = layers.Dense(4)(layers.Activation("gelu")(layers.Dense(8)(y)))
    return classifier(inputs, layers.Add()([x, y]))


def unet():
    inputs = keras.Input((16, 16, 3))
    down = conv(inputs, 4, name="stem")
    x = conv(layers.MaxPooling2D()(down), 8)
    x = layers.Conv2DTranspose(4, 2, 2)(x)
    x = layers.Concatenate()([layers.UpSampling2D()(layers.MaxPooling2D()(down)), x])
    return keras.Model(inputs, layers.Conv2D(2, 1, activation="sigmoid", name="head")(x))


def recurrent():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True, **INITIAL))(
        layers.Embedding(20, 4, name="stem")(inputs)
    )
    return keras.Model(inputs, layers.Dense(1, name="head")(layers.GRU(4, **INITIAL)(x)))


class Block(layers.Layer):
    """A block of a transformer with layers of its own, as the guides write one."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, width // 2, name="attention")
        self.norm = layers.LayerNormalization()
        self.wide = layers.Dense(2 * width, activation="gelu", name="wide")
        self.narrow = layers.Dense(width, name="narrow")

    def call(self, x):
        x = x + self.attention(x, x)
        return x + self.narrow(self.wide(self.norm(x)))


def transformer():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, name="stem")(inputs)
    x = Block(8, name="second")(Block(8, name="first")(x))
    return keras.Model(inputs, layers.Dense(20, name="head")(layers.LayerNormalization()(x)))


ZOO = (vgg, resnet, mobilenet, densenet, inception, efficientnet, convnext, unet, recurrent, transformer)
