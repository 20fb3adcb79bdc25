// load.h: reads a model of the Llama architecture, as Hugging Face's libraries write it, into device memory.
//
//   config.json ──────────> Shape
//   model.safetensors: length, names and places (JSON), tensors ── spinio_pread ──> device memory ── pack ──> Model
//
// Each tensor goes from the file to the device by one call of SPIN; matrices through a buffer of the size of the largest one.
// Refused, with a sentence: other architectures, other types than BF16, sizes that no row of a warp fits, biases, other activations than
// silu, positions that are scaled (rope_scaling), several tokens that end a sequence, and models in several files.
#ifndef STORIES_LOAD_H
#define STORIES_LOAD_H

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

#include <spinio.h>

#include "../server.h"
#include "json.h"
#include "model.h"

class ModelLoader {
public:
    explicit ModelLoader(const char *folder) : folder(folder) {}

    ~ModelLoader()
    {
        if (file >= 0)
            close(file);
        if (staging)
            cudaFree(staging);
    }

    bool load(Model &model, size_t &bytes)
    {
        return read_config(model.shape) && read_index() && load_weights(model) && (bytes = loaded, true);
    }

    std::string why;

private:
    struct Tensor {
        std::string type;
        std::vector<size_t> shape;
        size_t begin, end; // in the data
    };

    const std::string folder;
    std::map<std::string, Tensor> tensors;
    int file = -1;
    size_t data = 0, largest = 0, loaded = 0; // where the data begins, the longest tensor
    uint16_t *staging = nullptr;
    bool tied = false;

    bool refuse(const std::string &reason)
    {
        why = folder + ": " + reason;
        return false;
    }

    bool read_config(Shape &shape)
    {
        const std::string name = folder + "/config.json";
        FILE *in = std::fopen(name.c_str(), "re");
        if (!in)
            return refuse(std::string("config.json: ") + std::strerror(errno));
        std::string text(1 << 16, 0);
        text.resize(std::fread(text.data(), 1, text.size(), in));
        std::fclose(in);
        std::map<std::string, double> numbers;
        std::string kind;
        std::string activation = "silu";
        bool scaled = false, biased = false, several = false;
        json::Reader reader(text.data(), text.size());
        json::View key;
        for (bool more = reader.begin_object(); more && reader.next_member(key);) {
            const char next = reader.peek();
            if (json::is(key, "model_type") && next == '"') {
                const json::View value = reader.string();
                kind.assign(value.bytes, value.length);
            } else if (json::is(key, "tie_word_embeddings")) {
                tied = reader.boolean();
            } else if (json::is(key, "attention_bias") || json::is(key, "mlp_bias")) {
                biased = reader.boolean() || biased;
            } else if (json::is(key, "hidden_act") && next == '"') {
                const json::View value = reader.string();
                activation.assign(value.bytes, value.length);
            } else if (next == '-' || (next >= '0' && next <= '9')) {
                numbers[std::string(key.bytes, key.length)] = reader.number();
            } else {
                scaled = scaled || ((json::is(key, "rope_scaling") || json::is(key, "rope_parameters")) && next != 'n');
                several = several || (json::is(key, "eos_token_id") && next != 'n');
                reader.skip();
            }
        }
        if (reader.bad)
            return refuse("config.json is not a JSON object");
        if (kind != "llama")
            return refuse("config.json: model_type is \"" + kind + "\", not \"llama\"");
        if (scaled)
            return refuse("config.json: rope_scaling and rope_parameters are not supported");
        if (biased || several || activation != "silu")
            return refuse("config.json: attention_bias, mlp_bias, another hidden_act than silu and several eos_token_id are not supported");
        const auto number = [&](const char *name, double otherwise) { return numbers.count(name) ? numbers[name] : otherwise; };
        const auto count = [&](const char *name, double otherwise = 0) { return unsigned(number(name, otherwise)); };
        shape.hidden = count("hidden_size");
        shape.layers = count("num_hidden_layers");
        shape.inner = count("intermediate_size");
        shape.vocabulary = count("vocab_size");
        shape.context = count("max_position_embeddings");
        shape.heads = count("num_attention_heads");
        shape.key_heads = count("num_key_value_heads", shape.heads);
        shape.head = count("head_dim", shape.heads ? shape.hidden / shape.heads : 0);
        shape.epsilon = float(number("rms_norm_eps", 1e-6));
        shape.theta = float(number("rope_theta", 10000));
        shape.begin = int(number("bos_token_id", -1));
        shape.end = int(number("eos_token_id", -1));
        const bool whole = shape.hidden && shape.layers && shape.inner && shape.vocabulary && shape.context && shape.heads && shape.key_heads && shape.head;
        if (!whole || shape.heads % shape.key_heads || shape.head > longest_head || shape.head % 2)
            return refuse("config.json: sizes are missing, or heads are longer than " + std::to_string(longest_head));
        if (shape.begin >= int(shape.vocabulary) || shape.end >= int(shape.vocabulary))
            return refuse("config.json: bos_token_id or eos_token_id is not in the vocabulary");
        for (unsigned size : {shape.hidden, shape.inner, shape.vocabulary, shape.queries(), shape.keys()})
            if (size % lanes)
                return refuse("config.json: " + std::to_string(size) + " is not a multiple of " + std::to_string(lanes));
        return true;
    }

    bool read_index()
    {
        const std::string name = folder + "/model.safetensors";
        file = open(name.c_str(), O_RDONLY | O_CLOEXEC);
        uint64_t length = 0;
        if (file < 0 || pread(file, &length, sizeof length, 0) != sizeof length || length > 100 << 20)
            return refuse(std::string("model.safetensors: ") + (file < 0 ? std::strerror(errno) : "not a safetensors file"));
        std::string text(length, 0);
        data = sizeof length + length;
        if (pread(file, text.data(), length, sizeof length) != ssize_t(length))
            return refuse("model.safetensors ends within its head");
        json::Reader reader(text.data(), text.size());
        json::View key;
        for (bool more = reader.begin_object(); more && reader.next_member(key);) {
            if (json::is(key, "__metadata__"))
                reader.skip();
            else
                read_tensor(reader, tensors[std::string(key.bytes, key.length)]);
        }
        return !reader.bad || refuse("model.safetensors: its head is malformed");
    }

    void read_tensor(json::Reader &reader, Tensor &tensor)
    {
        json::View key;
        for (bool more = reader.begin_object(); more && reader.next_member(key);) {
            if (json::is(key, "dtype")) {
                const json::View value = reader.string();
                tensor.type.assign(value.bytes, value.length);
                continue;
            }
            std::vector<size_t> numbers;
            for (bool any = reader.begin_array(); any && reader.next_element();)
                numbers.push_back(size_t(reader.number()));
            if (json::is(key, "shape"))
                tensor.shape = numbers;
            else if (json::is(key, "data_offsets") && numbers.size() == 2)
                tensor.begin = numbers[0], tensor.end = numbers[1];
        }
        largest = largest > tensor.end - tensor.begin ? largest : tensor.end - tensor.begin;
    }

    // Reads a tensor of this shape into device memory; columns 0: a vector.
    bool read(const std::string &name, size_t rows, size_t columns, uint16_t *to)
    {
        const auto found = tensors.find(name);
        if (found == tensors.end())
            return refuse("model.safetensors has no " + name);
        const Tensor &tensor = found->second;
        const size_t bytes = rows * (columns ? columns : 1) * sizeof *to;
        if (tensor.type != "BF16")
            return refuse(name + " is of type " + tensor.type + ", not BF16");
        if (tensor.shape != (columns ? std::vector<size_t>{rows, columns} : std::vector<size_t>{rows}) || tensor.end - tensor.begin != bytes)
            return refuse(name + " has another shape than config.json says");
        const ssize_t got = spinio_pread(file, to, bytes, off_t(data + tensor.begin));
        if (got != ssize_t(bytes))
            return refuse(name + ": " + (got < 0 ? spinio_last_error() : "the file ends within it"));
        loaded += bytes;
        return true;
    }

    uint16_t *vector(const std::string &name, size_t rows, size_t columns = 0)
    {
        uint16_t *memory = nullptr;
        if (cudaMalloc(&memory, rows * (columns ? columns : 1) * sizeof *memory) != cudaSuccess) {
            refuse("no device memory for " + name);
            return nullptr;
        }
        return read(name, rows, columns, memory) ? memory : nullptr;
    }

    struct Part {
        std::string name;
        unsigned rows;
    };

    // Tensors, one below the other.
    bool matrix(Matrix &to, unsigned columns, const std::vector<Part> &parts)
    {
        unsigned rows = 0;
        for (const Part &part : parts)
            rows += part.rows;
        Chunk *chunks = nullptr;
        if (cudaMalloc(&chunks, size_t(rows) * columns * sizeof(uint16_t)) != cudaSuccess)
            return refuse("no device memory for " + parts[0].name);
        to = {chunks, rows, columns};
        unsigned first = 0;
        for (const Part &part : parts) {
            if (!read(part.name, part.rows, columns, staging))
                return false;
            spinio::launch(pack, spinio::emulated ? 1 : 256, spinio::emulated ? 32 : 256, staging, part.rows, columns, chunks, first);
            // The buffer is used again.
            if (cudaDeviceSynchronize() != cudaSuccess)
                return refuse("cannot pack " + part.name);
            first += part.rows;
        }
        return true;
    }

    bool make_angles(Model &model)
    {
        float *turns = zeros<float>(size_t(model.shape.context) * model.shape.head);
        if (!turns)
            return refuse("no device memory for the angles");
        spinio::launch(make_turns, 8, 64, model.shape, turns);
        model.turns = turns;
        return cudaDeviceSynchronize() == cudaSuccess || refuse("cannot compute the angles");
    }

    bool load_weights(Model &model)
    {
        const Shape &shape = model.shape;
        if (cudaMalloc(&staging, largest ? largest : 1) != cudaSuccess)
            return refuse("no device memory for the largest tensor");
        model.embedding = vector("model.embed_tokens.weight", shape.vocabulary, shape.hidden);
        model.norm = model.embedding ? vector("model.norm.weight", shape.hidden) : nullptr;
        if (!model.norm || !matrix(model.head, shape.hidden, {{tied ? "model.embed_tokens.weight" : "lm_head.weight", shape.vocabulary}}))
            return false;
        std::vector<Layer> layers(shape.layers);
        for (unsigned i = 0; i < shape.layers; i++) {
            const std::string name = "model.layers." + std::to_string(i) + ".";
            Layer &layer = layers[i];
            layer.attention_norm = vector(name + "input_layernorm.weight", shape.hidden);
            layer.inner_norm = layer.attention_norm ? vector(name + "post_attention_layernorm.weight", shape.hidden) : nullptr;
            const std::string attention = name + "self_attn.", mlp = name + "mlp.";
            if (!layer.inner_norm ||
                !matrix(layer.mix, shape.hidden, {{attention + "q_proj.weight", shape.queries()}, {attention + "k_proj.weight", shape.keys()}, {attention + "v_proj.weight", shape.keys()}}) ||
                !matrix(layer.out, shape.queries(), {{attention + "o_proj.weight", shape.hidden}}) ||
                !matrix(layer.gate_up, shape.hidden, {{mlp + "gate_proj.weight", shape.inner}, {mlp + "up_proj.weight", shape.inner}}) ||
                !matrix(layer.down, shape.inner, {{mlp + "down_proj.weight", shape.hidden}}))
                return false;
        }
        Layer *there = zeros<Layer>(shape.layers);
        if (!there || cudaMemcpy(there, layers.data(), layers.size() * sizeof(Layer), cudaMemcpyHostToDevice) != cudaSuccess)
            return refuse("no device memory for the layers");
        model.layers = there;
        return make_angles(model);
    }
};

// Loads the model of a folder, with the bytes of its weights; or says why not.
inline bool load_model(const char *folder, Model &model, size_t &bytes, std::string &why)
{
    ModelLoader loader(folder);
    const bool good = loader.load(model, bytes);
    why = loader.why;
    return good;
}

#endif
