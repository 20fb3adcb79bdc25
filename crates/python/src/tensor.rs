//! PyTorch's tensors, queried directly: DLPack and the CUDA array interface refuse some of them (parameters that
//! require gradients, 8-bit floats), and neither is as fast.

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use spinio_runtime::client::Stream;

use crate::described::{BufferGuard, Described, Location, ReadOrder, total_bytes};

/// `torch.Tensor` and `torch.cuda.current_stream`, once the program has imported torch.
struct Torch {
    tensor: Py<PyType>,
    current_stream: Py<PyAny>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Torch, if the program has imported it; SPIN never does.
fn torch(py: Python<'_>) -> PyResult<Option<&'static Torch>> {
    if let Some(known) = TORCH.get(py) {
        return Ok(Some(known));
    }
    let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
    let Some(module) = modules.get_item("torch")? else { return Ok(None) };
    // It may be in the middle of its import.
    let (Ok(tensor), Ok(cuda)) = (module.getattr("Tensor"), module.getattr("cuda")) else { return Ok(None) };
    let (Ok(tensor), Ok(current_stream)) = (tensor.cast_into::<PyType>(), cuda.getattr("current_stream")) else {
        return Ok(None);
    };
    let found = Torch { tensor: tensor.unbind(), current_stream: current_stream.unbind() };
    Ok(Some(TORCH.get_or_init(py, || found)))
}

/// The memory of a tensor; `None` if the object is none.
pub(crate) fn describe<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Described<'py>>> {
    let py = object.py();
    let Some(torch) = torch(py)? else { return Ok(None) };
    if !object.is_instance(torch.tensor.bind(py))? {
        return Ok(None);
    }
    if object.getattr("layout")?.str()? != "torch.strided" {
        return Err(PyBufferError::new_err("A sparse or nested tensor has no memory of its own: pass its parts"));
    }
    if object.call_method0("is_conj")?.is_truthy()? || object.call_method0("is_neg")?.is_truthy()? {
        return Err(PyBufferError::new_err(
            "The tensor is a conjugate or negative view, whose bytes are not its values: pass .resolve_conj() or \
             .resolve_neg()",
        ));
    }
    let device = object.getattr("device")?;
    let kind: String = device.getattr("type")?.extract()?;
    let (claim, order) = match kind.as_str() {
        "cpu" => (Location::Host, ReadOrder::Synchronous),
        "cuda" => {
            let stream = torch.current_stream.bind(py).call1((device,))?;
            (Location::Device, ReadOrder::On(Stream(stream.getattr("cuda_stream")?.extract()?)))
        }
        other => {
            return Err(PyBufferError::new_err(format!("SPIN cannot reach the memory of a tensor on \"{other}\"")));
        }
    };
    Ok(Some(Described {
        address: object.call_method0("data_ptr")?.extract()?,
        // Not `nbytes`, which came with PyTorch 2.
        bytes: total_bytes(
            &[object.call_method0("nelement")?.extract()?],
            object.call_method0("element_size")?.extract()?,
        )?,
        contiguous: object.call_method0("is_contiguous")?.is_truthy()?,
        readonly: false,
        location: claim,
        order,
        keep: BufferGuard::Object(object.clone()),
    }))
}
