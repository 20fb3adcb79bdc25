// completion.h: what a client asks for, in the body of POST /v1/completions as OpenAI's clients send it:
//
//     {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0.8, "seed": 7, "stream": true}
//
// A prompt is text where tokens are bytes, or an array of token ids. A field that would change the answer and is not supported is
// refused, not ignored.
#ifndef STORIES_COMPLETION_H
#define STORIES_COMPLETION_H

#include "json.h"
#include "model.h"

struct Completion {
    unsigned prompt; // tokens of it
    unsigned most;   // tokens to make
    float temperature;
    uint64_t seed;
    bool stream;
    const char *refusal; // a sentence, or NULL
};

class CompletionReader {
public:
    // `tokens`: room for Shape::context of them. Without a seed it is `seed`.
    __device__ CompletionReader(const Shape &shape, int *tokens, uint64_t seed) : shape(shape), tokens(tokens), asked{0, 256, 0.8f, seed, false, nullptr}
    {
        if (shape.begin >= 0)
            add(shape.begin);
    }

    __device__ Completion read(const char *body, size_t length)
    {
        const unsigned before = asked.prompt;
        json::Reader in(body, length);
        json::View name;
        for (bool more = in.begin_object(); more && in.next_member(name);)
            read_member(in, name);
        if (in.bad || in.peek() || in.at != length)
            asked.refusal = "The body is not a JSON object with fields of the right types.";
        else if (!asked.refusal && asked.prompt == 0)
            asked.refusal = "There is no prompt.";
        else if (!asked.refusal && asked.prompt >= shape.context)
            asked.refusal = "The prompt is longer than the model's context.";
        else if (!asked.refusal && asked.prompt == before && !shape.is_of_bytes())
            asked.refusal = "There is no prompt.";
        return asked;
    }

private:
    const Shape &shape;
    int *tokens;
    Completion asked;
    bool has_prompt = false;

    template <size_t count>
    __device__ static bool is_one_of(json::View name, const char *const (&names)[count])
    {
        for (const char *one : names)
            if (json::is(name, one))
                return true;
        return false;
    }

    __device__ void add(int token)
    {
        if (asked.prompt < shape.context)
            tokens[asked.prompt++] = token;
    }

    __device__ void read_member(json::Reader &in, json::View name)
    {
        if (json::is(name, "prompt")) {
            if (has_prompt)
                asked.refusal = "There are two prompts.";
            has_prompt = true;
            read_prompt(in);
        } else if (json::is(name, "max_tokens")) {
            const double most = in.number();
            if (most < 1)
                asked.refusal = "max_tokens must be at least 1.";
            asked.most = most < 1e9 ? unsigned(most) : 1000000000;
        } else if (json::is(name, "temperature")) {
            asked.temperature = float(in.number());
            if (!(asked.temperature >= 0 && asked.temperature <= 2))
                asked.refusal = "temperature must be from 0 to 2.";
        } else if (json::is(name, "seed")) {
            const double seed = in.number();
            if (!(seed >= -9e18 && seed <= 9e18))
                asked.refusal = "seed must be an integer of 64 bits.";
            else
                asked.seed = uint64_t(int64_t(seed));
        } else if (json::is(name, "stream")) {
            asked.stream = in.boolean();
        } else if (is_one_of(name, {"n", "best_of", "top_p", "repetition_penalty"})) {
            if (in.peek() == 'n')
                in.skip();
            else if (in.number() != 1)
                asked.refusal = "n, best_of, top_p and repetition_penalty must be 1: this server makes one sequence, from all tokens.";
        } else if (is_one_of(name, {"presence_penalty", "frequency_penalty", "min_p", "top_k"})) {
            if (in.peek() == 'n')
                in.skip();
            else if (in.number() != 0)
                asked.refusal = "presence_penalty, frequency_penalty, min_p and top_k must be 0.";
        } else if (is_one_of(name, {"stop", "suffix", "logprobs", "stream_options", "logit_bias", "echo"})) {
            if (in.peek() != 'n' && in.peek() != 'f')
                asked.refusal = "stop, suffix, logprobs, stream_options, logit_bias and echo are not supported.";
            in.skip();
        } else {
            in.skip();
        }
    }

    __device__ void read_prompt(json::Reader &in)
    {
        if (in.peek() == '"') {
            json::Characters text(in.string());
            for (int byte = text.next(); byte >= 0; byte = text.next())
                add(byte);
            in.bad = in.bad || text.bad;
            if (!shape.is_of_bytes())
                asked.refusal = "The tokens of this model are not bytes: the prompt must be an array of token ids.";
            return;
        }
        bool has_text = false;
        for (bool more = in.begin_array(); more && in.next_element();) {
            if (in.peek() == '"') {
                if (has_text)
                    asked.refusal = "There are two prompts.";
                has_text = true;
                read_prompt(in);
                continue;
            }
            const double token = in.number();
            if (!(token >= 0 && token < shape.vocabulary))
                asked.refusal = "The prompt has a token that is not in the vocabulary.";
            else
                add(int(token));
        }
    }
};

#endif
